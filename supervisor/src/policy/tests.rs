//! Tests of policies as a whole: the corpus, the built-in ones, composition and the command line's changes.

use super::{
    limits::{Asked, Bound},
    search::{self, PolicyRef, SearchPath, BUILTIN},
    warnings::warnings,
    Commands, Network, Overrides, Policy, PolicyError, Presence, View, WorkspaceAccess,
};
use crate::{
    chain::admission::Ruling,
    effect::{fs, Digest, Door, Effect, Kind, Request, Resource, Subject},
};
use std::{
    collections::BTreeSet,
    ffi::OsStr,
    path::{Path, PathBuf},
    time::Duration,
};
use tempfile::TempDir;

fn corpus(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/policy/corpus").join(part)
}

fn files(part: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(corpus(part)).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension() == Some(OsStr::new(extension)));
    files.sort();
    assert!(!files.is_empty());
    files
}

fn search() -> SearchPath {
    SearchPath { folders: Vec::new(), home: Some(PathBuf::from("/home/someone")) }
}

fn load(text: &str) -> Result<Policy, PolicyError> {
    Policy::load(&PolicyRef::parse(text)?, &search())
}

/// What the user sees, without this checkout's path.
fn message(error: &PolicyError, part: &str) -> String {
    let whole = format!("{error}\nhint: {}\n", error.hint());
    whole.replace(&format!("{}/", corpus(part).display()), "")
}

#[test]
fn every_valid_file_is_a_policy() {
    for path in files("valid", "toml") {
        if let Err(error) = load(path.to_str().unwrap()) {
            panic!("{}", message(&error, "valid"));
        }
    }
}

/// Set `TOLLGATE_WRITE_MESSAGES` to write the messages anew; the difference is then to be read.
#[test]
fn every_invalid_file_is_refused_with_its_message() {
    let write = std::env::var_os("TOLLGATE_WRITE_MESSAGES").is_some();
    for path in files("invalid", "toml") {
        let error = load(path.to_str().unwrap()).expect_err(&path.display().to_string());
        let found = message(&error, "invalid");
        let beside = path.with_extension("message");
        if write {
            std::fs::write(&beside, &found).unwrap();
        }
        let expected = std::fs::read_to_string(&beside).unwrap_or_default();
        assert_eq!(found, expected, "{}", path.display());
    }
}

#[test]
fn every_message_belongs_to_a_file() {
    for path in files("invalid", "message") {
        assert!(path.with_extension("toml").exists(), "{}", path.display());
    }
}

#[test]
fn every_built_in_policy_loads_and_every_file_of_the_folder_is_built_in() {
    for (name, _) in BUILTIN {
        let policy = load(name).unwrap_or_else(|error| panic!("{error}"));
        assert!(!policy.description.is_empty(), "{name}");
        assert_eq!(warnings(&policy), Vec::<String>::new(), "{name}");
        let limits = &policy.limits;
        assert!([limits.wall.asked, limits.cpu.asked].iter().all(|asked| *asked == Asked::Builtin), "{name}");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
    let names: BTreeSet<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension() == Some(OsStr::new("toml")))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, BUILTIN.iter().map(|(name, _)| (*name).to_owned()).collect());
}

fn effect(kind: Kind, path: &str) -> Effect {
    let owned = path.to_owned();
    let node = fs::Node::File { digest: Digest([0; 32]), bytes: 0, mode: 0o644 };
    let request = match kind {
        Kind::FsRead => fs::Request::Read { path: owned, offset: 0, limit: 1 },
        Kind::FsDelete => fs::Request::Delete { path: owned, expect: None },
        _ => fs::Request::Write { path: owned, node, expect: None },
    };
    Effect {
        kind,
        resource: Resource::Workspace { path: path.to_owned() },
        subject: Subject { uid: 1, run: None, agent: None },
        room: None,
        door: Door::Workspace,
        request: Request::Fs(request),
    }
}

fn is_allowed(policy: &Policy, kind: Kind, path: &str) -> bool {
    matches!(policy.admission.rule_on(&effect(kind, path)), Ruling::Allow { .. })
}

#[test]
fn protected_paths_are_asked_about_in_every_policy_that_writes() {
    let protected = [
        ".git/hooks/pre-commit",
        ".git/hooks",
        ".git",
        "vendor/x/.git/hooks/post-checkout",
        ".git/config",
        ".git/config.worktree",
        ".git/info/attributes",
        ".git/modules/a/b/hooks/update",
        ".git/modules/a/config",
        ".gitattributes",
        "sub/.gitattributes",
        ".gitmodules",
        ".vscode/tasks.json",
        "web/.vscode/settings.json",
        ".vscode",
        ".idea/workspace.xml",
        "my.code-workspace",
        ".nvim.lua",
        ".bashrc",
        ".zshenv",
        ".env",
        "api/.env.local",
        ".envrc",
        "mise.toml",
        ".npmrc",
        ".yarnrc.yml",
        ".pypirc",
        ".netrc",
        ".mcp.json",
        ".claude/settings.json",
        ".cursor/mcp.json",
        ".cargo/config.toml",
    ];
    let ordinary = [
        "src/main.rs",
        ".gitignore",
        ".git/index",
        ".git/objects/ab/cd",
        ".git/HEAD",
        "conftest.py",
        "sitecustomize.py",
        "Makefile",
        ".editorconfig",
        ".github/workflows/ci.yml",
        "AGENTS.md",
        "environment.py",
        "node_modules/.bin/x",
    ];
    for (name, _) in BUILTIN {
        let policy = load(name).unwrap();
        if policy.jail.workspace != WorkspaceAccess::ReadWrite {
            continue;
        }
        for path in protected {
            let ruling = policy.admission.rule_on(&effect(Kind::FsWrite, path));
            let Ruling::Ask { origin } = ruling else { panic!("{name}: {path}: {ruling:?}") };
            assert_eq!(origin.file, "policies/base.toml (built in)");
        }
        for path in ordinary {
            assert!(is_allowed(&policy, Kind::FsWrite, path), "{name}: {path}");
            assert!(is_allowed(&policy, Kind::FsDelete, path), "{name}: {path}");
        }
    }
}

#[test]
fn read_only_reads_and_compute_does_nothing() {
    let policy = load("read-only").unwrap();
    assert_eq!(policy.jail.workspace, WorkspaceAccess::ReadOnly);
    assert!(is_allowed(&policy, Kind::FsRead, "a"));
    assert!(!is_allowed(&policy, Kind::FsWrite, "a"));
    for policy in [load("compute").unwrap(), load(corpus("valid/empty.toml").to_str().unwrap()).unwrap()] {
        assert_eq!(policy.jail.workspace, WorkspaceAccess::Hidden);
        for kind in [Kind::FsRead, Kind::FsWrite, Kind::FsDelete] {
            assert!(!is_allowed(&policy, kind, "a"));
        }
    }
}

fn folder(files: &[(&str, &str)]) -> (TempDir, SearchPath) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let search = SearchPath { folders: vec![folder.path().to_owned()], home: Some("/home/someone".into()) };
    (folder, search)
}

fn named(name: &str) -> PolicyRef {
    PolicyRef::Name(name.to_owned())
}

#[test]
fn a_child_replaces_scalars_and_adds_to_lists() {
    let (_folder, search) = folder(&[
        (
            "parent.toml",
            "extends = ['base']\n[jail]\ncommands = ['a']\nenv = ['A', 'X=1']\nviews = ['/opt/v', '/opt/w']\n\
             [limits]\nwall = '1min'\n[[allow]]\neffect = ['fs/write']\npath = ['p/**']",
        ),
        (
            "child.toml",
            "extends = ['parent']\n[jail]\ncommands = ['b']\nenv = ['B', 'X=2']\n\
             views = [{ path = '/opt/v', optional = true }]\n[limits]\nwall = '2min'\n\
             [[allow]]\neffect = ['fs/write']\npath = ['c/**']",
        ),
    ]);
    let policy = Policy::load(&named("child"), &search).unwrap();
    assert_eq!(policy.jail.commands, Commands::List(vec!["b".into()]));
    assert!(policy.jail.environment.passes("A") && policy.jail.environment.passes("B"));
    assert_eq!(policy.jail.environment.fixed["X"], "2");
    let view = |path: &str, presence| View { path: path.into(), presence };
    assert_eq!(policy.jail.views, [view("/opt/w", Presence::Required), view("/opt/v", Presence::Optional)]);
    assert_eq!(policy.limits.wall.bound, Bound::At(Duration::from_secs(120)));
    assert_eq!((policy.limits.wall.asked, policy.limits.cpu.asked), (Asked::User, Asked::Builtin));
    assert!(is_allowed(&policy, Kind::FsWrite, "p/x") && is_allowed(&policy, Kind::FsWrite, "c/x"));
    assert!(!is_allowed(&policy, Kind::FsWrite, "x"));
    let sources: Vec<_> = policy.sources.iter().map(|path| path.file_name().unwrap()).collect();
    assert_eq!(sources, ["base.toml", "parent.toml", "child.toml"]);
}

#[test]
fn the_digest_tells_meanings_apart_and_not_spellings() {
    let spelling = |text: &str| {
        let (_folder, search) = folder(&[("p.toml", text)]);
        Policy::load(&named("p"), &search).unwrap().digest
    };
    let one = "[limits]\nmemory = '1GiB'\n[[allow]]\neffect = ['fs/read']\npath = ['**']\n\
               [[allow]]\neffect = ['fs/list']\npath = ['**']";
    let same = "# c\ndescription = 'd'\n[[allow]]\neffect = ['fs/list']\npath = ['**']\n\
                [[allow]]\neffect = ['fs/read']\npath = ['**']\n[limits]\nmemory = '1024MiB'";
    assert_eq!(spelling(one), spelling(same));
    for other in [
        one.replace("1GiB", "2GiB"),
        one.replace("[[allow]]\neffect = ['fs/list']", "[[allow]]\neffect = ['fs/write']"),
        format!("{one}\n[jail]\nenv = ['A']"),
        format!("{one}\n[jail]\nviews = ['/opt/x']"),
        format!("{one}\n[jail]\nenforce = 'best-effort'"),
    ] {
        assert_ne!(spelling(one), spelling(&other), "{other}");
    }
}

#[test]
fn a_policy_has_the_same_digest_each_time_and_another_one_a_different() {
    let empty = load(corpus("valid/empty.toml").to_str().unwrap()).unwrap();
    let again = load(corpus("valid/empty.toml").to_str().unwrap()).unwrap();
    assert_eq!(empty.digest, again.digest);
    assert_ne!(empty.digest, load("compute").unwrap().digest);
}

#[test]
fn a_file_that_cannot_be_used_never_gives_way_to_the_built_in_one() {
    let (folder, search) = folder(&[("python.toml", "[limits]\nwall = 0")]);
    assert!(matches!(Policy::load(&named("python"), &search), Err(PolicyError::Faults(_))));
    std::fs::remove_file(folder.path().join("python.toml")).unwrap();
    std::fs::create_dir(folder.path().join("python.toml")).unwrap();
    assert!(matches!(Policy::load(&named("python"), &search), Err(PolicyError::Unreadable { .. })));
    std::fs::write(folder.path().join("latin.toml"), b"description = '\xff'").unwrap();
    assert!(matches!(Policy::load(&named("latin"), &search), Err(PolicyError::Unreadable { .. })));
    std::fs::write(folder.path().join("long.toml"), vec![b'\n'; 2 << 20]).unwrap();
    assert!(matches!(Policy::load(&named("long"), &search), Err(PolicyError::TooLarge { .. })));
    assert!(matches!(Policy::load(&named("absent"), &search), Err(PolicyError::Unknown { .. })));
    let absent = PolicyRef::Path(folder.path().join("absent.toml"));
    assert!(matches!(Policy::load(&absent, &search), Err(PolicyError::Unreadable { .. })));
}

#[test]
fn a_file_may_hide_a_built_in_policy_and_the_list_says_so() {
    let (folder, search) = folder(&[("python.toml", "extends = ['builtin:python']\n[limits]\nwall = '1s'")]);
    let policy = Policy::load(&named("python"), &search).unwrap();
    assert_eq!(policy.limits.wall.bound, Bound::At(Duration::from_secs(1)));
    let list = search::list(&search);
    let entry = list.iter().find(|entry| entry.name == "python").unwrap();
    assert_eq!(entry.path, Some(folder.path().join("python.toml")));
    assert_eq!(entry.hides, ["built in"]);
    // Built-in policies build upon built-in policies only.
    let pytest = Policy::load(&named("pytest"), &search).unwrap();
    assert_eq!(pytest.limits.wall.asked, Asked::Builtin);
}

#[test]
fn cycles_and_crowds_are_refused() {
    let (_folder, search) = folder(&[("a.toml", "extends = ['b']"), ("b.toml", "extends = ['./a.toml']")]);
    let error = Policy::load(&named("a"), &search).unwrap_err().to_string();
    assert!(error.contains("cannot extend itself"), "{error}");
    let twice: Vec<(String, String)> = (0..30)
        .map(|level| (format!("l{level}.toml"), format!("extends = ['l{0}', 'l{0}']", level + 1)))
        .chain([("l30.toml".to_owned(), String::new())])
        .collect();
    let twice: Vec<_> = twice.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let (_folder, search) = self::folder(&twice);
    let error = Policy::load(&named("l0"), &search).unwrap_err().to_string();
    assert!(error.contains("at most 64 files"), "{error}");
}

#[test]
fn the_command_line_changes_what_it_names_and_the_digest() {
    let home = Path::new("/home/someone");
    let policy = load("default").unwrap();
    let before = policy.digest;
    assert_eq!(policy.clone().with(&Overrides::default(), Some(home)).unwrap().digest, before);
    let overrides = Overrides {
        memory: Some(Bound::At(1 << 30)),
        read_only: true,
        allow_env: vec!["TOKEN_*".into()],
        set_env: vec![("MODE".into(), "x".into())],
        views: vec!["~/tools".into()],
        best_effort: true,
        ..Overrides::default()
    };
    let policy = policy.with(&overrides, Some(home)).unwrap();
    assert_ne!(policy.digest, before);
    assert_eq!((policy.limits.memory.bound, policy.limits.memory.asked), (Bound::At(1 << 30), Asked::User));
    assert_eq!(policy.limits.wall.asked, Asked::Builtin);
    assert!(is_allowed(&policy, Kind::FsRead, "a") && !is_allowed(&policy, Kind::FsWrite, "a"));
    assert!(policy.jail.environment.passes("TOKEN_A") && !policy.jail.environment.passes("TOKEN"));
    assert!(policy.jail.views.contains(&View { path: "/home/someone/tools".into(), presence: Presence::Required }));
    // Read-only shows no workspace that the policy hides.
    let hidden = load("compute").unwrap().with(&overrides, Some(home)).unwrap();
    assert_eq!(hidden.jail.workspace, WorkspaceAccess::Hidden);
}

#[test]
fn nonsense_on_the_command_line_is_refused() {
    let table = [
        Overrides { allow_env: vec!["HOME".into()], ..Overrides::default() },
        Overrides { allow_env: vec!["A B".into()], ..Overrides::default() },
        Overrides { set_env: vec![("PATH".into(), "/x".into())], ..Overrides::default() },
        Overrides { set_env: vec![("A*".into(), "1".into())], ..Overrides::default() },
        Overrides { views: vec!["relative".into()], ..Overrides::default() },
        Overrides { views: vec!["/".into()], ..Overrides::default() },
        Overrides { views: vec!["~/x".into()], ..Overrides::default() },
        Overrides { views: vec!["/proc/1/root".into()], ..Overrides::default() },
        Overrides { profile: Some("../x".into()), ..Overrides::default() },
    ];
    for overrides in table {
        let result = load("default").unwrap().with(&overrides, None);
        assert!(matches!(result, Err(PolicyError::Option { .. })), "{overrides:?}");
    }
}

#[test]
fn no_view_shows_a_whole_home() {
    for path in ["/home", "/home/someone", "/home/someone/"] {
        let overrides = Overrides { views: vec![path.into()], ..Overrides::default() };
        let result = load("default").unwrap().with(&overrides, Some(Path::new("/home/someone")));
        assert!(matches!(result, Err(PolicyError::Option { .. })), "{path}");
    }
}

#[test]
fn a_deny_of_everything_hides_the_workspace() {
    let (_folder, search) = folder(&[("p.toml", "extends = ['default']\n[[deny]]\neffect = ['any']")]);
    let policy = Policy::load(&named("p"), &search).unwrap();
    assert_eq!(policy.jail.workspace, WorkspaceAccess::Hidden);
    assert!(!is_allowed(&policy, Kind::FsRead, "a"));
}

#[test]
fn commands_are_compared_by_their_last_component() {
    let commands = Commands::List(vec!["python3".into()]);
    assert!(commands.admit(OsStr::new("python3")) && commands.admit(OsStr::new("/usr/bin/python3")));
    for other in ["python", "python3.11", "xpython3", "python3/x", "", "/"] {
        assert!(!commands.admit(OsStr::new(other)), "{other}");
    }
}

#[test]
fn reads_that_are_denied_are_hidden() {
    let policy = load(corpus("valid/everything.toml").to_str().unwrap()).unwrap();
    assert_eq!(policy.jail.hide, ["**/.env", "secrets/**"]);
    assert!(!is_allowed(&policy, Kind::FsRead, "a/.env") && is_allowed(&policy, Kind::FsRead, "a"));
}

#[test]
fn the_users_folder_comes_before_the_systems() {
    let search = SearchPath::of_user(Some("/c".into()), Some("/h".into()));
    let system = PathBuf::from("/etc/tollgate/policies");
    assert_eq!(search.folders, [PathBuf::from("/c/tollgate/policies"), system.clone()]);
    let search = SearchPath::of_user(Some("relative".into()), Some("/h".into()));
    assert_eq!(search.folders, [PathBuf::from("/h/.config/tollgate/policies"), system.clone()]);
    assert_eq!(SearchPath::of_user(None, None).folders, [system]);
}

proptest::proptest! {
    #[test]
    fn no_text_panics_the_reader(text in "[\\[\\]a-z=\"'{}#\\n./* 0-9_\\\\é-]{0,200}") {
        let source = super::fault::Source { name: "x".into(), text: text.into() };
        if let Err(faults) = super::file::PolicyFile::parse(&source) {
            proptest::prop_assert!(!faults.is_empty());
            for fault in faults {
                proptest::prop_assert!(fault.line >= 1 && fault.column >= 1);
            }
        }
    }

    #[test]
    fn no_quantity_panics_and_none_is_zero(text in "[0-9.a-zA-Zé -]{0,30}") {
        use super::quantity;
        let zero = Bound::At(0);
        proptest::prop_assert!(quantity::size(&text) != Ok(zero) && quantity::count(&text) != Ok(zero));
        proptest::prop_assert!(quantity::duration(&text) != Ok(Bound::At(Duration::ZERO)));
        proptest::prop_assert!(!matches!(quantity::cpus(&text), Ok(Bound::At(cpus)) if cpus <= 0.0));
    }
}

#[test]
fn quantities_are_read_as_people_write_them() {
    use super::quantity::{count, cpus, duration, size, QuantityError as Wrong};
    let sizes =
        [("1B", 1), ("2k", 2048), ("2KB", 2000), ("100M", 100 << 20), ("1.5GiB", 3 << 29), ("1TB", 1_000_000_000_000)];
    for (text, bytes) in sizes {
        assert_eq!(size(text), Ok(Bound::At(bytes)), "{text}");
    }
    let durations = [
        ("500ms", 500),
        ("60s", 60_000),
        ("10min", 600_000),
        ("10m", 600_000),
        ("1h30m", 5_400_000),
        ("1.5h", 5_400_000),
        ("1d", 86_400_000),
    ];
    for (text, milliseconds) in durations {
        assert_eq!(duration(text), Ok(Bound::At(Duration::from_millis(milliseconds))), "{text}");
    }
    assert_eq!((count("7"), cpus("0.5")), (Ok(Bound::At(7)), Ok(Bound::At(0.5))));
    assert_eq!((size("unlimited"), duration("unlimited")), (Ok(Bound::Unlimited), Ok(Bound::Unlimited)));
    assert_eq!((size(""), duration("")), (Err(Wrong::Empty), Err(Wrong::Empty)));
    assert_eq!((size("0B"), duration("0h0m")), (Err(Wrong::Zero), Err(Wrong::Zero)));
    // Less than one of the smallest unit would round to zero.
    assert_eq!((size("0.1B"), cpus("0.0001")), (Err(Wrong::Zero), Err(Wrong::Zero)));
    assert_eq!((size("5"), duration("5")), (Err(Wrong::NoUnit), Err(Wrong::NoUnit)));
    assert_eq!((size("99999999T"), size("9999999999999999999999B")), (Err(Wrong::TooLarge), Err(Wrong::TooLarge)));
    for text in ["-1s", "+1s", ".5s", "1.s", "1 s", "s", "1s ", "1e3s"] {
        assert!(duration(text).is_err(), "{text}");
    }
}

/// Prints what the start of a run pays; `--nocapture` shows it. The bound is for debug builds on a busy machine.
#[test]
fn loading_is_quick() {
    let start = std::time::Instant::now();
    let policy = load("default").unwrap();
    let loaded = start.elapsed();
    assert!(is_allowed(&policy, Kind::FsWrite, "a"));
    println!("loaded in {loaded:?}, first ruling after {:?}", start.elapsed() - loaded);
    assert!(loaded < Duration::from_millis(500), "{loaded:?}");
}

#[test]
fn the_reference_names_every_key_kind_and_built_in_policy() {
    let reference = include_str!("../../../docs/policy.md");
    let kinds = crate::effect::VOCABULARY.iter().map(|row| row.name);
    let policies = BUILTIN.iter().map(|(name, _)| *name);
    for name in super::file::every_key().chain(kinds).chain(policies) {
        let written = [format!("`{name}`"), format!("`[{name}]`"), format!("`[[{name}]]`")];
        assert!(written.iter().any(|name| reference.contains(name)), "docs/policy.md does not name `{name}`");
    }
}

/// What the reference shows is what the reader gets.
#[test]
fn the_example_of_the_reference_is_a_policy() {
    let reference = include_str!("../../../docs/policy.md");
    let example = reference.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let (_folder, search) = folder(&[("site.toml", example)]);
    let policy = Policy::load(&named("site"), &search).unwrap();
    assert!(is_allowed(&policy, Kind::FsWrite, "public/index.html"));
    assert!(!is_allowed(&policy, Kind::FsWrite, "content/index.md"));
}

fn with_flags(policy: &str, allow: &[&str], deny: &[&str]) -> Result<Policy, PolicyError> {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let overrides = Overrides { allow: owned(allow), deny: owned(deny), ..Overrides::default() };
    load(policy).unwrap().with(&overrides, None)
}

#[test]
fn no_built_in_policy_opens_the_network_but_those_made_for_it() {
    for (name, _) in BUILTIN {
        let policy = load(&format!("builtin:{name}")).unwrap();
        assert_eq!(policy.uses_network(), name.starts_with("packages-") || *name == "github-read", "{name}");
        assert_eq!(policy.network, Network::default(), "{name}");
    }
    assert!(!load(corpus("valid").join("everything.toml").to_str().unwrap()).unwrap().uses_network());
}

#[test]
fn an_option_allows_what_it_names_and_nothing_else() {
    use crate::effect::tests::{connect, http, resolve};
    for (allow, deny, effect, allowed) in [
        ("api.test", "", http("POST", "https://api.test/x?y"), true),
        ("api.test", "", http("GET", "http://API.test./a/../b"), true),
        ("api.test", "", http("GET", "https://api.test:8443/"), false),
        ("api.test", "", connect("api.test", 443), false),
        ("api.test", "", resolve("api.test"), true),
        ("api.test", "", resolve("x.api.test"), false),
        ("*.api.test", "", http("GET", "https://x.api.test/"), true),
        ("*.api.test", "", http("GET", "https://api.test/"), false),
        ("api.test:8443", "", http("GET", "https://api.test:8443/"), true),
        ("api.test:8443", "", connect("api.test", 8443), true),
        ("api.test:8443", "", http("GET", "https://api.test/"), false),
        ("::1", "", http("GET", "http://[::1]/"), true),
        ("[::1]:22", "", connect("::1", 22), true),
        ("[::1]", "", http("GET", "http://[::1]/"), true),
        ("any", "", http("GET", "https://x.test/"), true),
        ("any:22", "", connect("x.test", 22), true),
        ("GET,HEAD https://api.test/v1/**", "", http("HEAD", "https://api.test/v1/x"), true),
        ("GET,HEAD https://api.test/v1/**", "", http("POST", "https://api.test/v1/x"), false),
        ("https://api.test/v1/**", "", http("POST", "https://api.test/v1/x"), true),
        ("https://api.test/v1/**", "", http("POST", "https://api.test/v2/x"), false),
        ("any", "api.test", http("GET", "https://api.test/"), false),
        ("any", "api.test", resolve("api.test"), false),
        ("any", "api.test", http("GET", "https://x.api.test/"), true),
        ("any", "DELETE https://api.test/**", http("DELETE", "https://api.test/x"), false),
        ("any", "DELETE https://api.test/**", http("GET", "https://api.test/x"), true),
    ] {
        for policy in ["default", "read-only", "compute"] {
            let deny: &[&str] = if deny.is_empty() { &[] } else { &[deny] };
            let policy = with_flags(policy, &[allow], deny).unwrap();
            assert!(policy.uses_network());
            let ruling = policy.admission.rule_on(&effect);
            assert_eq!(matches!(ruling, Ruling::Allow { .. }), allowed, "{allow} {deny:?} {}", effect.resource);
        }
    }
}

#[test]
fn an_option_that_is_none_says_how_it_is_written() {
    for wrong in [
        "",
        "a b",
        "api.test:0",
        "api.test:x",
        "127.1",
        "*",
        "api.*",
        "https://api.test",
        "get it https://",
        ":80",
        "ftp://api.test/",
        "api.test/path",
        "GET  , https://api.test/",
        "user@api.test",
    ] {
        let error = with_flags("default", &[wrong], &[]).expect_err(wrong).to_string();
        assert!(error.starts_with("--allow: ") && error.contains(&format!("`{wrong}`")), "{error}");
    }
    let private = |text: &str| {
        let overrides = Overrides { private: vec![text.to_owned()], ..Overrides::default() };
        load("default").unwrap().with(&overrides, None).map(|policy| policy.network.private)
    };
    assert_eq!(private("API.test=10.0.0.0/8").unwrap().keys().collect::<Vec<_>>(), ["api.test"]);
    for wrong in ["api.test", "api.test=", "api.test=10.0.0.1/8", "*.test=10.0.0.0/8", "=10.0.0.1"] {
        assert!(private(wrong).unwrap_err().to_string().starts_with("--private: "), "{wrong}");
    }
}

#[test]
fn a_denied_host_stays_denied_and_the_refusal_names_the_option() {
    let policy = with_flags("default", &["any"], &["evil.test"]).unwrap();
    let effect = crate::effect::tests::http("GET", "https://evil.test/");
    let Ruling::Deny { origin } = policy.admission.rule_on(&effect) else { panic!("not denied") };
    assert_eq!(origin.cited(), "the command line: --deny evil.test on \"evil.test\"");
}

#[test]
fn a_granted_port_of_the_host_is_a_rule_of_its_own() {
    use crate::effect::tests::connect;
    let overrides = Overrides { host_ports: vec![6379, 5432, 5432], ..Overrides::default() };
    let policy = load("default").unwrap().with(&overrides, None).unwrap();
    assert_eq!(policy.network.host_ports, [5432, 6379]);
    assert!(policy.uses_network());
    for (host, port, allowed) in [
        ("127.0.0.1", 5432, true),
        ("::1", 6379, true),
        ("localhost", 5432, true),
        ("127.0.0.1", 22, false),
        ("127.0.0.2", 5432, false),
        ("db.test", 5432, false),
    ] {
        let ruling = policy.admission.rule_on(&connect(host, port));
        assert_eq!(matches!(ruling, Ruling::Allow { .. }), allowed, "{host}:{port}");
    }
}

#[test]
fn tables_of_the_network_add_up_and_rules_with_targets_change_the_digest() {
    let parent =
        "[network]\nresolver = '127.0.0.1:1'\nhost_ports = [1]\n[network.private]\n'a.test' = ['10.0.0.0/8']\n";
    let child = "extends = ['./parent.toml']\n[network]\nresolver = '127.0.0.1:2'\nhost_ports = [2, 1]\n\
                 [network.private]\n'A.test.' = ['::1', '10.0.0.0/8']\n'b.test' = ['::1']\n";
    let (_folder, search) = folder(&[("parent.toml", parent), ("child.toml", child)]);
    let policy = Policy::load(&named("child"), &search).unwrap();
    assert_eq!(policy.network.resolver, Some("127.0.0.1:2".parse().unwrap()));
    assert_eq!(policy.network.host_ports, [1, 2]);
    let private: Vec<(&str, usize)> =
        policy.network.private.iter().map(|(host, networks)| (host.as_str(), networks.len())).collect();
    assert_eq!(private, [("a.test", 2), ("b.test", 1)]);

    let digest = |allow: &[&str]| with_flags("default", allow, &[]).unwrap().digest;
    assert_eq!(digest(&[]), load("default").unwrap().digest);
    assert_ne!(digest(&["a.test"]), digest(&[]));
    assert_ne!(digest(&["a.test"]), digest(&["b.test"]));
    assert_eq!(digest(&["a.test", "b.test"]), digest(&["b.test", "a.test"]));
    assert_eq!(digest(&["A.test."]), digest(&["a.test"]));
}

#[test]
fn what_of_the_network_is_open_wider_or_less_than_it_reads_is_a_warning() {
    for (text, part) in [
        ("[[allow]]\neffect = ['http/request']\nmethod = ['GET']\n", "every host outside can be asked"),
        ("[[allow]]\neffect = ['net/connect']\nport = [22]\n", "every host outside can be connected to"),
        ("[[allow]]\neffect = ['net/connect']\nhost = ['a.test']\n", "every port can be connected to"),
        ("[[allow]]\neffect = ['net/resolve']\nhost = ['a.test']\n", "net/resolve alone opens no network"),
        ("[network.private]\n'a.test' = ['::1']\n", "names a.test, which no rule allows"),
    ] {
        let (_folder, search) = folder(&[("p.toml", text)]);
        let found = warnings(&Policy::load(&named("p"), &search).unwrap());
        assert!(found.len() == 1 && found[0].contains(part), "{text}: {found:?}");
    }
    let quiet = "[network.private]\n'a.test' = ['::1']\n[[allow]]\neffect = ['http/request', 'net/connect']\n\
                 host = ['a.test']\nport = [22]\n";
    let (_folder, search) = folder(&[("p.toml", quiet)]);
    assert_eq!(warnings(&Policy::load(&named("p"), &search).unwrap()), Vec::<String>::new());
}
