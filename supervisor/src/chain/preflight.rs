//! Preflight: the program is executed, its effects are not.
//!
//! An answering handler. What the policy would say of each effect is written down, and none is refused for it, so that
//! one pass shows every need. What then happens follows from the kind's own stand-in: reading the run's view and what
//! stays within the run goes on; a change that the program asks for at the API door happens in the run's own layer; a
//! change of the workspace is planned when the run ends; anything that reaches outside is answered as if it had
//! happened, or refused where nothing can stand in for it. Reads that the policy refuses stay refused, because a read
//! is real.
//!
//! Everything after the first answer that a live run might not get is marked as uncertain: from there the program may
//! take another way. Nothing here touches anything.

use super::{
    admission::{Admission, Ruling},
    Answer, BoxFuture, Chain, Decision, Handler, Next, World,
};
use crate::effect::{Class, Digest, Door, Effect, Kind, Request, Resource, StandIn};
use futures_util::FutureExt as _;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

const NAME: &str = "preflight";

/// The most different effects of one run that a plan lists, its changes of files not counted; a program that asks for
/// more must not fill the memory. What is not listed is said.
const MOST: usize = 10_000;

/// The handler, for one run. It must be told the run's admission before it is asked.
#[derive(Default)]
pub struct Preflight {
    admission: OnceLock<Arc<Admission>>,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    entries: Vec<Planned>,
    known: HashMap<(Door, Digest), usize>,
    uncertain: bool,
    unlisted: u64,
}

/// One effect of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    /// Its place in the plan, from 1.
    pub n: u64,
    /// Which kind.
    pub kind: Kind,
    /// The object.
    pub resource: Resource,
    /// The door it came in by.
    pub door: Door,
    /// The arguments.
    pub request: Request,
    /// [`Effect::digest`].
    pub digest: Digest,
    /// How many bytes it would write.
    pub bytes: u64,
    /// What the policy would say.
    pub would: Would,
    /// The rule that would, as the policy writes it; empty where none matches.
    pub rule: String,
    /// Why it would not pass; empty if it would.
    pub reason: String,
    /// What to change for it to pass; empty if it would.
    pub hint: String,
    /// What the program was told.
    pub answered: Answered,
    /// Whether the program had by then got an answer that a live run might not get.
    pub uncertain: bool,
    /// How often it was asked for.
    pub times: u64,
}

/// What the policy would say of a planned effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Would {
    /// It would pass.
    Allowed,
    /// A person would be asked.
    Asked,
    /// It would be refused.
    Refused,
}

/// What the program was told of a planned effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answered {
    /// It was done in the run's own layer, or touches nothing outside the run.
    InTheRun,
    /// A stand-in: success, with what the request itself implies.
    StandIn,
    /// It was refused, as it would be live.
    Refused,
    /// Nothing: it is a change of the workspace, found when the program was over.
    NotAsked,
}

impl Preflight {
    /// Says which admission is judged by. Only the first time counts.
    pub fn judge_by(&self, admission: Admission) {
        let _ = self.admission.set(Arc::new(admission));
    }

    /// The plan so far, and how many effects it does not list.
    pub fn plan(&self) -> (Vec<Planned>, u64) {
        let log = self.log();
        (log.entries.clone(), log.unlisted)
    }

    /// Adds what the jail itself refused, which no policy rule is about.
    pub fn note_refused(&self, effect: &Effect, answer: &Answer) {
        let opinion = Opinion {
            would: Would::Refused,
            rule: String::new(),
            reason: answer.reason.clone(),
            hint: answer.hint.clone(),
        };
        self.note(effect, opinion, Answered::Refused);
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opinion(&self, effect: &Effect) -> Opinion {
        let Some(admission) = self.admission.get() else {
            return Opinion {
                would: Would::Refused,
                rule: String::new(),
                reason: "no policy was given to the preflight".to_owned(),
                hint: "this is a bug of Tollgate; please report it".to_owned(),
            };
        };
        let (would, rule) = match admission.rule_on(effect) {
            Ruling::Allow { origin } => (Would::Allowed, origin.to_string()),
            Ruling::Ask { origin } => (Would::Asked, origin.to_string()),
            Ruling::Deny { origin } => (Would::Refused, origin.to_string()),
            Ruling::Unmatched => (Would::Refused, String::new()),
        };
        // The words are those of the refusal itself: the handler is asked, with nothing behind it.
        let alone = Chain::new(vec![Arc::clone(admission) as _]);
        let answer = alone.perform(effect, &Nowhere).now_or_never();
        let answer = answer.unwrap_or_else(|| Answer::refused("admission", "", ""));
        let reason = match (would, answer.reason.is_empty()) {
            (Would::Asked, true) => format!("by the rule {rule}"),
            (Would::Allowed | Would::Asked | Would::Refused, _) => answer.reason,
        };
        Opinion { would, rule, reason, hint: answer.hint }
    }

    fn note(&self, effect: &Effect, opinion: Opinion, answered: Answered) {
        let digest = effect.digest();
        let mut log = self.log();
        let log = &mut *log;
        match log.known.get(&(effect.door, digest)) {
            Some(&index) => log.entries[index].times += 1,
            None if effect.door != Door::Workspace && log.known.len() >= MOST => log.unlisted += 1,
            None => {
                log.known.insert((effect.door, digest), log.entries.len());
                log.entries.push(Planned {
                    n: log.entries.len() as u64 + 1,
                    kind: effect.kind,
                    resource: effect.resource.clone(),
                    door: effect.door,
                    request: effect.request.clone(),
                    digest,
                    bytes: effect.bytes(),
                    would: opinion.would,
                    rule: opinion.rule,
                    reason: opinion.reason,
                    hint: opinion.hint,
                    answered,
                    uncertain: log.uncertain,
                    times: 1,
                });
            }
        }
        log.uncertain |= matches!(answered, Answered::StandIn | Answered::Refused);
    }

    async fn answer(&self, effect: &Effect, next: Next<'_>) -> Answer {
        let opinion = self.opinion(effect);
        if effect.door == Door::Workspace {
            let answer = planned(effect, &opinion);
            self.note(effect, opinion, Answered::NotAsked);
            return answer;
        }
        let only_reads = effect.classes().iter().all(|class| *class == Class::Read);
        if only_reads && opinion.would != Would::Allowed {
            let answer = Answer::refused("admission", opinion.reason.clone(), opinion.hint.clone());
            self.note(effect, opinion, Answered::Refused);
            return answer;
        }
        if effect.door == Door::Program {
            // A system call: whatever it does, the jail lets it do within the run, and what it changed is planned at
            // the end.
            return next.run(effect).await;
        }
        let in_the_layer = matches!(effect.request, Request::Fs(_)) && effect.door == Door::Api;
        match effect.kind.declaration().stand_in {
            StandIn::World => {
                let answer = next.run(effect).await;
                // A read of the view needs no plan: it has happened, and its receipt says so.
                if !only_reads {
                    self.note(effect, opinion, told(&answer));
                }
                answer
            }
            StandIn::Done if in_the_layer => {
                let answer = next.run(effect).await;
                let stays = told(&answer);
                let answer = match answer.is_success() {
                    true => Answer { decision: Decision::Planned, decided_by: NAME, ..answer },
                    false => answer,
                };
                self.note(effect, opinion, stays);
                answer
            }
            StandIn::Done => {
                let answer = planned(effect, &opinion);
                self.note(effect, opinion, Answered::StandIn);
                answer
            }
            StandIn::Nothing => {
                self.note(effect, opinion, Answered::Refused);
                Answer::refused(
                    NAME,
                    format!("{} of `{}`: nothing can stand in for it", effect.kind, effect.resource),
                    "it is in the plan; run without `--preflight` for it to happen",
                )
            }
        }
    }
}

/// How an effect that was passed on went.
fn told(answer: &Answer) -> Answered {
    if answer.is_success() {
        Answered::InTheRun
    } else {
        Answered::Refused
    }
}

impl Handler for Preflight {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(self.answer(effect, next))
    }
}

struct Opinion {
    would: Would,
    rule: String,
    reason: String,
    hint: String,
}

/// As if it had happened.
fn planned(effect: &Effect, opinion: &Opinion) -> Answer {
    let reason = match opinion.would {
        Would::Allowed => "planned; it would be allowed".to_owned(),
        Would::Asked => format!("planned; a person would be asked: {}", opinion.reason),
        Would::Refused => format!("planned; it would be refused: {}", opinion.reason),
    };
    Answer {
        decision: Decision::Planned,
        decided_by: NAME,
        reason,
        hint: opinion.hint.clone(),
        body: stand_in_body(effect),
        ..Answer::done(implied_by_effect(effect), effect.bytes())
    }
}

/// The header by which a stand-in for a server's answer is known.
const STAND_IN_HEADER: &str = "tollgate-stand-in";

/// The result that an effect itself implies. Of a request that is an empty answer, which says whose it is.
fn implied_by_effect(effect: &Effect) -> serde_json::Value {
    match &effect.request {
        Request::Http(request) if request.method == "DELETE" => {
            serde_json::json!({ "status": 204, "headers": [[STAND_IN_HEADER, "1"]] })
        }
        Request::Http(_)
        | Request::Fs(_)
        | Request::Run(_)
        | Request::Jail(_)
        | Request::Api(_)
        | Request::Program(_)
        | Request::Net(_) => implied_by(&effect.resource),
    }
}

/// The bytes that go with it: an empty JSON object, where the answer to such a method has content at all (RFC 9110,
/// sections 9.3.2 and 15.3.5).
fn stand_in_body(effect: &Effect) -> Option<Vec<u8>> {
    match &effect.request {
        Request::Http(request) if !matches!(request.method.as_str(), "DELETE" | "HEAD") => Some(b"{}".to_vec()),
        Request::Http(_)
        | Request::Fs(_)
        | Request::Run(_)
        | Request::Jail(_)
        | Request::Api(_)
        | Request::Program(_)
        | Request::Net(_) => None,
    }
}

/// The result that a request itself implies.
pub(crate) fn implied_by(resource: &Resource) -> serde_json::Value {
    match resource {
        Resource::Workspace { path } => serde_json::json!({ "path": path }),
        Resource::Run { id } => serde_json::json!({ "run": id }),
        Resource::Url { .. } => serde_json::json!({
            "status": 200,
            "headers": [["content-type", "application/json"], [STAND_IN_HEADER, "1"]],
        }),
        Resource::Host { .. } | Resource::Address { .. } | Resource::Syscall { .. } => {
            serde_json::json!({})
        }
    }
}

/// A world in which nothing happens.
struct Nowhere;

impl World for Nowhere {
    fn execute<'a>(&'a self, _effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::ready(Answer::done(serde_json::Value::Null, 0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::{admit, ask, wait, FakeWorld, WorldOf},
        effect::{
            tests::{connect, http, resolve, sample},
            VOCABULARY,
        },
    };

    fn preflight(kinds: &[Kind]) -> Arc<Preflight> {
        let preflight = Arc::new(Preflight::default());
        preflight.judge_by(admit(kinds));
        preflight
    }

    fn at(door: Door, kind: Kind) -> Effect {
        Effect { door, ..sample(kind) }
    }

    #[test]
    fn nothing_that_could_reach_outside_the_run_reaches_the_world() {
        for row in VOCABULARY {
            for door in Door::ALL {
                let preflight = preflight(&VOCABULARY.iter().map(|row| row.kind).collect::<Vec<_>>());
                let effect = at(door, row.kind);
                let inside = row.stand_in == StandIn::World
                    || door == Door::Program
                    || (door == Door::Api && matches!(effect.request, Request::Fs(_)));
                let world = WorldOf(|effect: &Effect| {
                    assert!(inside && door != Door::Workspace, "{} by {door:?} reached the world", effect.kind);
                    Answer::done(serde_json::Value::Null, 0)
                });
                let answer = wait(ask(vec![Arc::clone(&preflight) as _], &effect, &world));
                assert!(answer.is_success() || row.stand_in == StandIn::Nothing, "{}: {answer:?}", row.name);
            }
        }
    }

    #[test]
    fn a_request_gets_an_empty_answer_that_says_whose_it_is_and_a_connection_none() {
        let preflight = preflight(&[Kind::HttpRequest]);
        let world = WorldOf(|effect: &Effect| {
            assert_eq!(effect.kind, Kind::NetResolve, "reached the world");
            Answer::done(serde_json::Value::Null, 0)
        });
        let told = |effect: &Effect| wait(ask(vec![Arc::clone(&preflight) as _], effect, &world));
        for (method, status, body) in
            [("GET", 200, Some(&b"{}"[..])), ("POST", 200, Some(b"{}")), ("HEAD", 200, None), ("DELETE", 204, None)]
        {
            let answer = told(&http(method, "https://api.test/x"));
            assert_eq!((answer.decision, answer.decided_by), (Decision::Planned, NAME));
            assert_eq!((&answer.value["status"], answer.body.as_deref()), (&status.into(), body), "{method}");
            let headers = answer.value["headers"].as_array().unwrap();
            assert!(headers.contains(&serde_json::json!(["tollgate-stand-in", "1"])), "{headers:?}");
        }
        assert_eq!(told(&connect("db.test", 5432)).decision, Decision::Refused);
        assert_eq!(told(&resolve("api.test")).decision, Decision::Allowed);
        let (plan, _) = preflight.plan();
        let woulds: Vec<(Kind, Would)> = plan.iter().map(|planned| (planned.kind, planned.would)).collect();
        assert_eq!(woulds[4..], [(Kind::NetConnect, Would::Refused), (Kind::NetResolve, Would::Allowed)]);
    }

    #[test]
    fn what_the_policy_would_refuse_is_planned_and_the_program_goes_on() {
        let preflight = preflight(&[Kind::FsRead]);
        let answer =
            wait(ask(vec![Arc::clone(&preflight) as _], &at(Door::Workspace, Kind::FsWrite), &FakeWorld::default()));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Planned, "preflight"));
        assert!(answer.reason.starts_with("planned; it would be refused"), "{}", answer.reason);
        let (plan, _) = preflight.plan();
        assert_eq!((plan.len(), plan[0].would, plan[0].answered), (1, Would::Refused, Answered::NotAsked));
        assert!(!plan[0].hint.is_empty());
    }

    #[test]
    fn a_read_that_the_policy_refuses_stays_refused() {
        let preflight = preflight(&[Kind::FsWrite]);
        let world = FakeWorld::default();
        let answer = wait(ask(vec![Arc::clone(&preflight) as _], &at(Door::Api, Kind::FsRead), &world));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "admission"));
        assert!(world.done.lock().unwrap().is_empty());
        assert_eq!(preflight.plan().0[0].would, Would::Refused);
    }

    #[test]
    fn everything_after_an_answer_that_a_live_run_might_not_get_is_uncertain() {
        let preflight = preflight(&[Kind::FsWrite, Kind::FsDelete, Kind::FsMove]);
        let world = FakeWorld::default();
        let one = |effect: &Effect| wait(ask(vec![Arc::clone(&preflight) as _], effect, &world));
        one(&at(Door::Api, Kind::FsWrite));
        one(&at(Door::Control, Kind::FsDelete));
        one(&at(Door::Api, Kind::FsMove));
        one(&at(Door::Workspace, Kind::FsWrite));
        let plan: Vec<(Answered, bool)> =
            preflight.plan().0.iter().map(|planned| (planned.answered, planned.uncertain)).collect();
        assert_eq!(
            plan,
            [
                (Answered::InTheRun, false),
                (Answered::StandIn, false),
                (Answered::InTheRun, true),
                (Answered::NotAsked, true)
            ]
        );
    }

    #[test]
    fn equal_effects_are_one_entry_with_a_count_and_without_a_policy_nothing_would_be_allowed() {
        let preflight = Arc::new(Preflight::default());
        for _ in 0..3 {
            wait(ask(vec![Arc::clone(&preflight) as _], &at(Door::Api, Kind::FsWrite), &FakeWorld::default()));
        }
        let (plan, unlisted) = preflight.plan();
        assert_eq!((plan.len(), plan[0].times, unlisted), (1, 3, 0));
        assert_eq!(plan[0].would, Would::Refused);
    }
}
