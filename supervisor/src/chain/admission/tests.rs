//! Admission decides as its rules say, in whatever order they stand.

use super::*;
use crate::effect::{
    jail,
    tests::{connect, http, resolve},
    Digest, Door, RunId, Subject,
};
use proptest::prelude::*;
use std::sync::Arc;

fn subject() -> Subject {
    Subject { uid: 1000, run: Some(RunId("0123456789ab".into())), agent: None }
}

fn effect(kind: Kind, resource: Resource, request: Request) -> Effect {
    Effect { kind, resource, subject: subject(), room: None, door: Door::Workspace, request }
}

fn on_path(kind: Kind, path: &str) -> Effect {
    let owned = path.to_owned();
    let file = fs::Node::File { digest: Digest([0; 32]), bytes: 1, mode: 0o644 };
    let request = match kind {
        Kind::FsRead => fs::Request::Read { path: owned, offset: 0, limit: 1 },
        Kind::FsList => fs::Request::List { path: owned },
        Kind::FsDelete => fs::Request::Delete { path: owned, expect: None },
        _ => fs::Request::Write { path: owned, node: file, expect: None },
    };
    effect(kind, Resource::Workspace { path: path.to_owned() }, Request::Fs(request))
}

fn write(path: &str) -> Effect {
    on_path(Kind::FsWrite, path)
}

fn make_directory(path: &str) -> Effect {
    let request = fs::Request::Write { path: path.into(), node: fs::Node::Directory { mode: 0o755 }, expect: None };
    Effect { request: Request::Fs(request), ..write(path) }
}

fn rename(from: &str, to: &str) -> Effect {
    let request = Request::Fs(fs::Request::Move { path: from.into(), to: to.into() });
    effect(Kind::FsMove, Resource::Workspace { path: from.into() }, request)
}

fn start() -> Effect {
    let request = run::Request::Start {
        command: vec!["true".into()],
        policy: "default".into(),
        policy_digest: String::new(),
        directory: String::new(),
        environment: Vec::new(),
    };
    effect(Kind::RunStart, Resource::Run { id: "x".into() }, Request::Run(request))
}

fn rule(verdict: Verdict, kinds: &[Kind], paths: &[&str]) -> Rule {
    let origin = Origin { file: "p.toml".into(), line: 7, text: format!("{verdict:?}") };
    let paths = match paths {
        [] => Paths::Any,
        paths => Paths::Only(Patterns::new(paths.iter().map(|path| path.to_string()).collect()).unwrap()),
    };
    Rule { verdict, kinds: Kinds::Only(kinds.to_vec()), paths, target: Target::default(), origin }
}

fn admission(rules: Vec<Rule>) -> Admission {
    Admission::of(Layer::new("p.toml", Home::File, rules))
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Said {
    Allow,
    Ask,
    Deny,
    Unmatched,
}

fn said(admission: &Admission, effect: &Effect) -> Said {
    match admission.rule_on(effect) {
        Ruling::Allow { .. } => Said::Allow,
        Ruling::Ask { .. } => Said::Ask,
        Ruling::Deny { .. } => Said::Deny,
        Ruling::Unmatched => Said::Unmatched,
    }
}

#[test]
fn patterns_match_by_component_and_case() {
    let table = [
        ("src/**", "src/a.rs", Said::Allow),
        ("src/**", "src/a/b.rs", Said::Allow),
        ("src/**", "srcs/a.rs", Said::Unmatched),
        ("src/**", "Src/a.rs", Said::Unmatched),
        ("src/**", "x/src/a.rs", Said::Unmatched),
        ("a/b", "a/bc", Said::Unmatched),
        ("a/b", "a/b/c", Said::Unmatched),
        ("*", "a", Said::Allow),
        ("*", "a/b", Said::Unmatched),
        ("?", "/", Said::Unmatched),
        ("**", "", Said::Allow),
        ("**", "a", Said::Allow),
        ("**", "a/.b/c", Said::Allow),
        ("**/x", "x", Said::Allow),
        ("**/x", "a/x", Said::Allow),
        ("**/x", "a/yx", Said::Unmatched),
        ("[ab]/c", "a/c", Said::Allow),
        ("{a,b}/c", "b/c", Said::Allow),
        ("\\*", "*", Said::Allow),
        ("\\*", "a", Said::Unmatched),
    ];
    for (pattern, path, expected) in table {
        let admission = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite], &[pattern])]);
        assert_eq!(said(&admission, &write(path)), expected, "{pattern} on {path:?}");
    }
}

#[test]
fn texts_that_no_path_can_match_are_no_patterns() {
    for text in ["", "/etc", "~/x", "a//b", "./a", "a/../b", "a/", "[a", "{a/b,c}", "[a/b]", "a/{b"] {
        assert!(Patterns::new(vec![text.into()]).is_err(), "{text}");
    }
}

#[test]
fn deny_wins_over_ask_and_ask_over_allow_in_any_order() {
    let rules = [
        rule(Verdict::Allow, &[Kind::FsWrite], &["**"]),
        rule(Verdict::Ask, &[Kind::FsWrite], &["a/**"]),
        rule(Verdict::Deny, &[Kind::FsWrite], &["a/b"]),
    ];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let admission = admission(order.map(|place: usize| rules[place].clone()).to_vec());
        assert_eq!(said(&admission, &write("c")), Said::Allow);
        assert_eq!(said(&admission, &write("a/c")), Said::Ask);
        assert_eq!(said(&admission, &write("a/b")), Said::Deny);
    }
}

#[test]
fn a_move_needs_both_of_its_paths() {
    let admission = admission(vec![
        rule(Verdict::Allow, &[Kind::FsMove], &["a/**"]),
        rule(Verdict::Ask, &[Kind::FsMove], &["a/asked"]),
    ]);
    assert_eq!(said(&admission, &rename("a/x", "a/y")), Said::Allow);
    assert_eq!(said(&admission, &rename("a/x", "b/y")), Said::Unmatched);
    assert_eq!(said(&admission, &rename("b/x", "a/y")), Said::Unmatched);
    assert_eq!(said(&admission, &rename("a/x", "a/asked")), Said::Ask);
    assert_eq!(said(&admission, &rename("a/asked", "a/x")), Said::Ask);
}

#[test]
fn what_lies_below_a_moved_removed_or_replaced_directory_is_protected_too() {
    let kinds = [Kind::FsWrite, Kind::FsDelete, Kind::FsMove];
    let admission = admission(vec![
        rule(Verdict::Allow, &kinds, &["**"]),
        rule(Verdict::Ask, &kinds, &["**/.git/hooks/**", "**/.env"]),
    ]);
    for protected in [
        on_path(Kind::FsDelete, ".git/hooks"),
        on_path(Kind::FsDelete, "sub/.git"),
        rename(".git", "x"),
        rename("x", ".git"),
        write(".git"),
        write(".git/hooks/pre-commit"),
        on_path(Kind::FsDelete, ""),
    ] {
        assert_eq!(said(&admission, &protected), Said::Ask, "{protected:?}");
    }
    // Making the directory, and removing others, stays free.
    for free in [make_directory(".git"), on_path(Kind::FsDelete, "target"), rename("src", "lib"), write("src")] {
        assert_eq!(said(&admission, &free), Said::Allow, "{free:?}");
    }
}

#[test]
fn what_the_jail_refused_and_host_paths_are_never_admitted() {
    let any = Rule { kinds: Kinds::Any, ..rule(Verdict::Allow, &[], &[]) };
    let seen = jail::Request { syscall: "x".into(), errno: "EPERM".into(), process: "p".into(), pid: 2 };
    for admission in [Admission::everything(), admission(vec![any])] {
        assert_eq!(said(&admission, &write("a")), Said::Allow);
        for (kind, resource) in [
            (Kind::NetConnect, Resource::Address { to: "1.2.3.4:5".into() }),
            (Kind::ProcessExec, Resource::Host { path: "/x".into() }),
            (Kind::ProcessSyscall, Resource::Syscall { name: "mount".into() }),
            (Kind::ProcessExec, Resource::Workspace { path: "a".into() }),
        ] {
            assert_eq!(said(&admission, &effect(kind, resource, Request::Jail(seen.clone()))), Said::Deny);
        }
        let outside = Effect { resource: Resource::Host { path: "/etc/passwd".into() }, ..write("a") };
        assert_eq!(said(&admission, &outside), Said::Deny);
    }
}

#[test]
fn a_request_that_does_not_belong_to_its_kind_or_resource_is_refused() {
    let everything = Admission::everything();
    assert_eq!(said(&everything, &Effect { kind: Kind::FsRead, ..write("a") }), Said::Deny);
    assert_eq!(said(&everything, &Effect { resource: Resource::Run { id: "x".into() }, ..write("a") }), Said::Deny);
    let two_paths = Effect { resource: Resource::Workspace { path: "a".into() }, ..write("b") };
    let only_a = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite], &["a"])]);
    assert_eq!(said(&only_a, &two_paths), Said::Unmatched);
}

#[test]
fn rules_with_paths_do_not_match_effects_without() {
    assert_eq!(said(&admission(vec![rule(Verdict::Allow, &[Kind::RunStart], &["**"])]), &start()), Said::Unmatched);
    assert_eq!(said(&admission(vec![rule(Verdict::Allow, &[Kind::RunStart], &[])]), &start()), Said::Allow);
}

struct Done;

impl crate::chain::World for Done {
    fn execute<'a>(&'a self, _: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::ready(Answer::done(serde_json::Value::Null, 0)))
    }
}

fn perform(admission: Admission, effect: &Effect) -> Answer {
    let chain = super::super::Chain::new(vec![Arc::new(admission)]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(chain.perform(effect, &Done))
}

#[test]
fn a_refusal_names_kind_object_rule_and_remedy() {
    let patterns = Patterns::at_lines(vec!["x".into(), "secret/**".into()], vec![8, 9]).unwrap();
    let denied = Rule { paths: Paths::Only(patterns), ..rule(Verdict::Deny, &[Kind::FsWrite], &[]) };
    let asked = rule(Verdict::Ask, &[Kind::FsWrite], &["hook"]);
    let rules = || vec![denied.clone(), asked.clone()];

    let answer = perform(admission(rules()), &write("secret/a"));
    assert_eq!((answer.decided_by, answer.is_success()), ("admission", false));
    assert_eq!(answer.reason, "fs/write secret/a: refused by the rule Deny on \"secret/**\" (p.toml:9)");
    assert!(answer.hint.contains("p.toml:9"), "{}", answer.hint);

    let answer = perform(admission(rules()), &write("hook"));
    assert_eq!(answer.decided_by, "approval");
    assert!(answer.reason.contains("a person must approve it"), "{}", answer.reason);
    assert!(answer.hint.contains("tollgate apply 0123456789ab hook"), "{}", answer.hint);

    let answer = perform(admission(rules()), &write("a[1].txt"));
    assert_eq!(answer.decided_by, "admission");
    assert_eq!(answer.reason, "fs/write a[1].txt: no rule of the policy p.toml allows it");
    assert_eq!(answer.hint, "add to p.toml: [[allow]] effect = [\"fs/write\"], path = [\"a[[]1[]].txt\"]");

    let answer = perform(Admission::nothing(), &start());
    assert_eq!((answer.decided_by, answer.is_success()), ("admission", false));
    assert!(perform(Admission::everything(), &write("a")).is_success());
}

#[test]
fn the_rule_that_a_hint_names_admits_the_effect_and_no_other() {
    for path in ["a[1].txt", "we*ird", "{x,y}", "q?", "back\\\\slash", "plain/name"] {
        let pattern = refusal::exact_pattern(path);
        let admission = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite], &[pattern.as_str()])]);
        assert_eq!(said(&admission, &write(path)), Said::Allow, "{path}");
        assert_eq!(said(&admission, &write(&format!("{path}x"))), Said::Unmatched, "{path}");
    }
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let verdict = prop_oneof![Just(Verdict::Allow), Just(Verdict::Ask), Just(Verdict::Deny)];
    let kinds = prop::collection::vec(
        prop::sample::select(vec![Kind::FsRead, Kind::FsWrite, Kind::FsDelete, Kind::FsMove, Kind::RunStart]),
        1..3,
    );
    let texts = vec!["**", "a/**", "a/b", "**/b", "*", "a/*/c", "b"];
    let paths = prop::collection::vec(prop::sample::select(texts), 0..3);
    (verdict, kinds, paths).prop_map(|(verdict, kinds, paths)| rule(verdict, &kinds, &paths))
}

fn any_admission() -> impl Strategy<Value = Admission> {
    let layer = prop::collection::vec(any_rule(), 0..5).prop_map(admission);
    prop_oneof![
        1 => Just(Admission::everything()),
        1 => Just(Admission::nothing()),
        8 => prop::collection::vec(layer, 1..3).prop_map(|layers| {
            layers.iter().fold(Admission::everything(), |all, layer| all.narrow(layer))
        }),
    ]
}

fn any_effect() -> impl Strategy<Value = Effect> {
    let path = prop::sample::select(vec!["", "a", "b", "a/b", "a/b/c", "c/b", "a/x/c"]);
    let kind = prop::sample::select(vec![Kind::FsRead, Kind::FsWrite, Kind::FsDelete]);
    prop_oneof![
        (kind, path.clone()).prop_map(|(kind, path)| on_path(kind, path)),
        (path.clone(), path).prop_map(|(from, to)| rename(from, to)),
        Just(start()),
    ]
}

/// Stricter is larger.
fn strictness(said: Said) -> u8 {
    match said {
        Said::Allow => 0,
        Said::Ask => 1,
        Said::Unmatched | Said::Deny => 2,
    }
}

proptest! {
    #[test]
    fn narrowing_commutes(a in any_admission(), b in any_admission(), effect in any_effect()) {
        prop_assert_eq!(a.narrow(&b), b.narrow(&a));
        prop_assert_eq!(a.narrow(&b).rule_on(&effect), b.narrow(&a).rule_on(&effect));
    }

    #[test]
    fn narrowing_is_associative(a in any_admission(), b in any_admission(), c in any_admission()) {
        prop_assert_eq!(a.narrow(&b).narrow(&c), a.narrow(&b.narrow(&c)));
    }

    #[test]
    fn narrowing_is_idempotent(a in any_admission()) {
        prop_assert_eq!(a.narrow(&a), a);
    }

    #[test]
    fn everything_is_the_identity_and_nothing_refuses_all(a in any_admission(), effect in any_effect()) {
        prop_assert_eq!(a.narrow(&Admission::everything()), a.clone());
        let none = said(&a.narrow(&Admission::nothing()), &effect);
        prop_assert_eq!(strictness(none), 2);
    }

    #[test]
    fn narrowing_is_as_strict_as_the_stricter(
        a in any_admission(), b in any_admission(), effect in any_effect()
    ) {
        let both = strictness(said(&a.narrow(&b), &effect));
        prop_assert_eq!(both, strictness(said(&a, &effect)).max(strictness(said(&b, &effect))));
    }
}

fn call(kind: Kind, resource: Resource) -> Effect {
    let request = Request::Program(program::Request { syscall: "openat".into(), to: None });
    Effect { kind, resource, subject: subject(), room: None, door: Door::Program, request }
}

fn file(path: &str) -> Resource {
    Resource::Workspace { path: path.to_owned() }
}

#[test]
fn a_call_of_the_program_passes_where_its_view_shows_the_file_and_no_rule_denies_it() {
    let rules = vec![
        rule(Verdict::Allow, &[Kind::FsRead, Kind::FsList], &["**"]),
        rule(Verdict::Allow, &[Kind::FsWrite], &["out/**"]),
        rule(Verdict::Ask, &[Kind::FsWrite], &[".git/**"]),
        rule(Verdict::Deny, &[Kind::FsWrite], &["locked/**"]),
        rule(Verdict::Deny, &[Kind::FsRead], &["**/.env"]),
    ];
    let admission = admission(rules);
    for path in ["out/a", "elsewhere", ".git/config"] {
        let ruling = admission.rule_on(&call(Kind::FsWrite, file(path)));
        assert!(matches!(ruling, Ruling::Allow { .. }), "{path}: {ruling:?}");
    }
    for (kind, path) in [(Kind::FsWrite, "locked/a"), (Kind::FsRead, "a/.env"), (Kind::FsWrite, "a/.env")] {
        let ruling = admission.rule_on(&call(kind, file(path)));
        assert!(matches!(ruling, Ruling::Deny { .. }), "{kind} {path}: {ruling:?}");
    }
    let exec = call(Kind::ProcessExec, Resource::Host { path: "/usr/bin/true".into() });
    assert!(matches!(admission.rule_on(&exec), Ruling::Allow { .. }));
}

#[test]
fn a_call_on_the_workspace_is_refused_where_no_view_shows_it_and_by_any_other_door() {
    let read = call(Kind::FsRead, file("a"));
    assert_eq!(Admission::nothing().rule_on(&read), Ruling::Unmatched);
    let elsewhere = Effect { door: Door::Api, ..read };
    assert!(matches!(Admission::everything().rule_on(&elsewhere), Ruling::Deny { .. }));
}

fn about(verdict: Verdict, kinds: &[Kind], target: Target) -> Rule {
    Rule { target, ..rule(verdict, kinds, &[]) }
}

fn hosts(texts: &[&str]) -> Option<Listed<HostPattern>> {
    Some(Listed::new(texts.iter().map(|text| HostPattern::parse(text).unwrap()).collect()))
}

fn urls(texts: &[&str]) -> Option<Listed<UrlPattern>> {
    Some(Listed::new(texts.iter().map(|text| UrlPattern::parse(text).unwrap()).collect()))
}

fn words(texts: &[&str]) -> Option<Vec<String>> {
    Some(texts.iter().map(|text| (*text).to_owned()).collect())
}

fn doing(operation: &str) -> Effect {
    let mut effect = http("POST", "https://api.test/graphql");
    if let Request::Http(request) = &mut effect.request {
        request.operation = Some(operation.to_owned());
    }
    effect
}

#[test]
fn every_part_of_a_target_must_match_and_of_a_part_one() {
    let admission = admission(vec![
        about(
            Verdict::Allow,
            &[Kind::HttpRequest],
            Target { hosts: hosts(&["api.test", "*.cdn.test"]), methods: words(&["GET", "HEAD"]), ..Target::default() },
        ),
        about(
            Verdict::Allow,
            &[Kind::NetConnect, Kind::HttpRequest],
            Target { hosts: hosts(&["db.test"]), ports: Some(vec![5432]), ..Target::default() },
        ),
        about(
            Verdict::Allow,
            &[Kind::HttpRequest],
            Target { urls: urls(&["https://api.test/upload/**"]), methods: words(&["POST"]), ..Target::default() },
        ),
    ]);
    for (effect, expected) in [
        (http("GET", "https://api.test/x"), Said::Allow),
        (http("HEAD", "http://a.b.cdn.test:8080/"), Said::Allow),
        (http("get", "https://api.test/x"), Said::Unmatched),
        (http("POST", "https://api.test/x"), Said::Unmatched),
        (http("POST", "https://api.test/upload/a"), Said::Allow),
        (http("POST", "https://api.test/upload/../x"), Said::Unmatched),
        (http("GET", "https://cdn.test/"), Said::Unmatched),
        (http("GET", "https://evilcdn.test/"), Said::Unmatched),
        (http("GET", "https://api.test.evil.test/"), Said::Unmatched),
        (connect("db.test", 5432), Said::Allow),
        (connect("DB.test.", 5432), Said::Allow),
        (connect("db.test", 5433), Said::Unmatched),
        (connect("api.test", 443), Said::Unmatched),
        (http("PUT", "http://db.test:5432/"), Said::Allow),
        (resolve("api.test"), Said::Allow),
        (resolve("x.cdn.test"), Said::Allow),
        (resolve("db.test"), Said::Allow),
        (resolve("other.test"), Said::Unmatched),
        (write("a"), Said::Unmatched),
    ] {
        assert_eq!(said(&admission, &effect), expected, "{effect:?}");
    }
}

#[test]
fn a_deny_about_a_part_of_a_host_holds_for_every_spelling_of_it() {
    let admission = admission(vec![
        about(Verdict::Allow, &[Kind::HttpRequest], Target { hosts: hosts(&["api.test"]), ..Target::default() }),
        about(
            Verdict::Deny,
            &[Kind::HttpRequest],
            Target { urls: urls(&["https://api.test/admin/**"]), ..Target::default() },
        ),
        about(Verdict::Deny, &[Kind::HttpRequest], Target { methods: words(&["DELETE"]), ..Target::default() }),
    ]);
    for (effect, expected) in [
        (http("GET", "https://api.test/x"), Said::Allow),
        (http("GET", "https://api.test/admin/x"), Said::Deny),
        (http("GET", "https://API.test./%61dmin/x"), Said::Deny),
        (http("GET", "https://api.test/x/../admin/x"), Said::Deny),
        (http("GET", "https://api.test//admin/x"), Said::Deny),
        (http("GET", "http://api.test/admin/x"), Said::Allow),
        (http("delete", "https://api.test/x"), Said::Deny),
        // Its name is asked for, since some requests to it are allowed.
        (resolve("api.test"), Said::Allow),
    ] {
        assert_eq!(said(&admission, &effect), expected, "{effect:?}");
    }
}

#[test]
fn an_operation_that_nobody_can_tell_is_restricted_and_not_allowed() {
    let of = |verdict, operations: &[&str]| {
        about(verdict, &[Kind::HttpRequest], Target { operations: words(operations), ..Target::default() })
    };
    let reads = admission(vec![of(Verdict::Allow, &["graphql/query", "git/fetch"])]);
    for (operation, expected) in [
        ("graphql/query", Said::Allow),
        ("git/fetch", Said::Allow),
        ("git/push", Said::Unmatched),
        ("graphql/mutation", Said::Unmatched),
        ("graphql/unknown", Said::Unmatched),
    ] {
        assert_eq!(said(&reads, &doing(operation)), expected, "{operation}");
    }
    assert_eq!(said(&reads, &http("POST", "https://api.test/graphql")), Said::Unmatched);
    let all = || about(Verdict::Allow, &[Kind::HttpRequest], Target::default());
    let restricted = admission(vec![all(), of(Verdict::Deny, &["graphql/mutation"]), of(Verdict::Ask, &["git/push"])]);
    for (operation, expected) in [
        ("graphql/query", Said::Allow),
        ("graphql/mutation", Said::Deny),
        ("graphql/unknown", Said::Deny),
        ("git/push", Said::Ask),
        ("git/fetch", Said::Allow),
    ] {
        assert_eq!(said(&restricted, &doing(operation)), expected, "{operation}");
    }
}

#[test]
fn any_does_not_open_the_network_and_closes_it() {
    let any = |verdict| Rule { kinds: Kinds::Any, ..rule(verdict, &[], &[]) };
    let network = || rule(Verdict::Allow, &NETWORK_KINDS, &[]);
    for effect in [http("GET", "https://api.test/"), connect("api.test", 22), resolve("api.test")] {
        assert_eq!(said(&admission(vec![any(Verdict::Allow)]), &effect), Said::Unmatched);
        assert_eq!(said(&admission(vec![network()]), &effect), Said::Allow);
        assert_eq!(said(&admission(vec![network(), any(Verdict::Allow)]), &effect), Said::Allow);
        assert_eq!(said(&admission(vec![network(), any(Verdict::Deny)]), &effect), Said::Deny);
        assert_eq!(said(&Admission::everything(), &effect), Said::Allow);
        assert_eq!(said(&Admission::asking_about(&["p.toml".to_owned()]), &effect), Said::Allow);
    }
}

#[test]
fn a_rule_about_paths_or_hosts_is_about_nothing_else() {
    let paths = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite, Kind::HttpRequest], &["**"])]);
    assert_eq!(said(&paths, &http("GET", "https://api.test/")), Said::Unmatched);
    let target = || Target { hosts: hosts(&["api.test"]), ..Target::default() };
    let on_host = admission(vec![about(Verdict::Allow, &[Kind::FsWrite, Kind::RunStart], target())]);
    assert_eq!(said(&on_host, &write("a")), Said::Unmatched);
    assert_eq!(said(&on_host, &start()), Said::Unmatched);
}

#[test]
fn a_host_in_no_usual_spelling_is_never_admitted() {
    for host in ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "a b", "", "api..test"] {
        assert_eq!(said(&Admission::everything(), &connect(host, 80)), Said::Deny, "{host:?}");
        assert_eq!(said(&Admission::everything(), &resolve(host)), Said::Deny, "{host:?}");
    }
    let loopback = admission(vec![about(
        Verdict::Allow,
        &[Kind::NetConnect],
        Target { hosts: hosts(&["127.0.0.1"]), ..Target::default() },
    )]);
    assert_eq!(said(&loopback, &connect("127.0.0.1", 80)), Said::Allow);
    assert_eq!(said(&loopback, &connect("::ffff:127.0.0.1", 80)), Said::Allow);
}

#[test]
fn a_question_about_a_name_waits_for_nobody() {
    let asks = admission(vec![about(
        Verdict::Ask,
        &[Kind::HttpRequest],
        Target { hosts: hosts(&["api.test"]), ..Target::default() },
    )]);
    assert_eq!(said(&asks, &resolve("api.test")), Said::Allow);
    assert_eq!(said(&asks, &http("GET", "https://api.test/")), Said::Ask);
}

#[test]
fn a_refusal_of_a_request_names_it_and_the_very_option_to_add() {
    let nothing = || admission(Vec::new());
    let answer = perform(nothing(), &http("POST", "https://api.test/v1/items?x=1"));
    assert_eq!(
        answer.reason,
        "http/request POST https://api.test/v1/items?x=1: no rule of the policy p.toml allows it"
    );
    let start =
        "start the run with `--allow api.test`, or for this alone `--allow 'POST https://api.test/v1/items'`; or \
                 add to p.toml: [[allow]] effect = [\"http/request\"], method = [\"POST\"], \
                 url = [\"https://api.test/v1/items\"]";
    assert_eq!(answer.hint, start);
    let answer = perform(nothing(), &connect("db.test", 5432));
    assert_eq!(answer.reason, "net/connect db.test:5432: no rule of the policy p.toml allows it");
    assert!(answer.hint.starts_with("start the run with `--allow db.test:5432`; or "), "{}", answer.hint);
    let answer = perform(nothing(), &resolve("api.test"));
    assert!(answer.hint.starts_with("start the run with `--allow api.test`; or "), "{}", answer.hint);
    let answer = perform(nothing(), &connect("::1", 22));
    assert!(answer.hint.contains("--allow '[::1]:22'"), "{}", answer.hint);

    let mut denied = about(
        Verdict::Deny,
        &[Kind::HttpRequest],
        Target { urls: urls(&["https://a.test/", "https://api.test/**"]), ..Target::default() },
    );
    denied.target.urls.as_mut().unwrap().lines = vec![8, 9];
    let answer = perform(admission(vec![denied]), &http("GET", "https://api.test/x"));
    assert_eq!(
        answer.reason,
        "http/request GET https://api.test/x: refused by the rule Deny on \"https://api.test/**\" (p.toml:9)"
    );
    assert_eq!(answer.rule.as_deref(), Some("p.toml:9 Deny on \"https://api.test/**\""));
}

fn any_target() -> impl Strategy<Value = Target> {
    let host = prop::sample::subsequence(vec!["api.test", "*.test", "127.0.0.1"], 0..3);
    let url = prop::sample::subsequence(vec!["https://api.test/**", "*://*/a/*", "http://*.test/a"], 0..3);
    let method = prop::sample::subsequence(vec!["GET", "POST"], 0..2);
    let port = prop::sample::subsequence(vec![80u16, 443], 0..2);
    (host, url, method, port).prop_map(|(host, url, method, port)| Target {
        hosts: (!host.is_empty()).then(|| hosts(&host)).flatten(),
        urls: (!url.is_empty()).then(|| urls(&url)).flatten(),
        methods: (!method.is_empty()).then(|| words(&method)).flatten(),
        ports: (!port.is_empty()).then_some(port),
        operations: None,
    })
}

fn any_network_admission() -> impl Strategy<Value = Admission> {
    let verdict = prop_oneof![3 => Just(Verdict::Allow), 1 => Just(Verdict::Ask), 1 => Just(Verdict::Deny)];
    let kinds = prop::sample::subsequence(NETWORK_KINDS.to_vec(), 1..=3);
    let rule = (verdict, kinds, any_target()).prop_map(|(verdict, kinds, target)| about(verdict, &kinds, target));
    let layer = prop::collection::vec(rule, 0..4).prop_map(admission);
    prop::collection::vec(layer, 0..3)
        .prop_map(|layers| layers.iter().fold(Admission::everything(), |all, layer| all.narrow(layer)))
}

fn any_network_effect() -> impl Strategy<Value = Effect> {
    let host = || prop::sample::select(vec!["api.test", "API.test.", "x.api.test", "test", "127.0.0.1", "127.1"]);
    let path = prop::sample::select(vec!["/", "/a", "/a/b", "/a/../b", "/%61/b", "/a?b"]);
    let method = prop::sample::select(vec!["GET", "POST", "get"]);
    let scheme = prop::sample::select(vec!["http", "https"]);
    prop_oneof![
        (host(), prop::sample::select(vec![80u16, 443, 22])).prop_map(|(host, port)| connect(host, port)),
        host().prop_map(resolve),
        (scheme, host(), path, method)
            .prop_map(|(scheme, host, path, method)| http(method, &format!("{scheme}://{host}{path}"))),
    ]
}

proptest! {
    #[test]
    fn rules_about_the_network_narrow_as_others_do(
        a in any_network_admission(), b in any_network_admission(), effect in any_network_effect()
    ) {
        prop_assert_eq!(a.narrow(&b), b.narrow(&a));
        prop_assert_eq!(a.narrow(&a), a.clone());
        let both = strictness(said(&a.narrow(&b), &effect));
        prop_assert_eq!(both, strictness(said(&a, &effect)).max(strictness(said(&b, &effect))));
    }

    #[test]
    fn another_spelling_of_a_host_gets_the_same_ruling(
        a in any_network_admission(), path in prop::sample::select(vec!["/", "/a", "/a/b"])
    ) {
        let one = said(&a, &http("GET", &format!("https://api.test{path}")));
        prop_assert_eq!(one, said(&a, &http("GET", &format!("https://API.Test.{path}"))));
        prop_assert_eq!(said(&a, &connect("127.0.0.1", 80)), said(&a, &connect("::ffff:127.0.0.1", 80)));
    }

    /// Whoever may do something with a host may ask for its name, and nobody else.
    #[test]
    fn a_name_is_admitted_with_what_it_is_for(a in any_network_admission(), effect in any_network_effect()) {
        if let Request::Http(request) = &effect.request {
            let named = a.layers().iter().flat_map(|layer| layer.rules());
            let denied = named.clone().any(|rule| rule.verdict == Verdict::Deny);
            if !denied && strictness(said(&a, &effect)) < 2 {
                prop_assert_eq!(said(&a, &resolve(&request.host)), Said::Allow);
            }
        }
    }
}
