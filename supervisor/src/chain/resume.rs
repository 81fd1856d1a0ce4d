//! Resume: what must not be repeated and is known to be done is answered from the ledger.
//!
//! An answering handler of a run that takes over an interrupted one. The n-th occurrence of a request gets the n-th
//! result that the interrupted run had for an equal one; when those are used up, the effect goes on as any other. What
//! may be repeated is never held here: it is done again.

use super::{Answer, BoxFuture, Decision, Handler, Next};
use crate::{
    effect::{net, Digest, Door, Effect, Idempotency, Request, Resource, RunId},
    ledger::{once::NOT_KEPT, OnceResult},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

const NAME: &str = "resume";

/// The handler, for one run.
pub struct Resumed {
    /// The interrupted run, and those that it had taken over in its turn.
    runs: Vec<RunId>,
    known: Mutex<HashMap<Digest, VecDeque<OnceResult>>>,
}

impl Resumed {
    /// With the results of these interrupted runs, the one that is taken over first, and all their results in order.
    pub fn new(runs: Vec<RunId>, results: Vec<(Digest, OnceResult)>) -> Resumed {
        let mut known: HashMap<Digest, VecDeque<OnceResult>> = HashMap::new();
        for (digest, result) in results {
            known.entry(digest).or_default().push_back(result);
        }
        Resumed { runs, known: Mutex::new(known) }
    }

    fn take(&self, effect: &Effect) -> Option<OnceResult> {
        if !matches!(effect.door, Door::Api | Door::Network) || effect.idempotency() != Idempotency::Once {
            return None;
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        self.digests(effect).into_iter().find_map(|digest| known.get_mut(&digest)?.pop_front())
    }

    /// The effect's digest, and for one on the run itself those that it had when the run was another.
    fn digests(&self, effect: &Effect) -> Vec<Digest> {
        let mut digests = vec![effect.digest()];
        let own = effect.subject.run.as_ref().map(|run| Resource::Run { id: run.0.clone() });
        if own.is_some_and(|own| own == effect.resource) {
            digests.extend(self.runs.iter().map(|run| {
                let resource = Resource::Run { id: run.0.clone() };
                Effect { resource, ..effect.clone() }.digest()
            }));
        }
        digests
    }
}

/// Why a known result cannot be given again.
fn lost(effect: &Effect, result: &OnceResult) -> Option<&'static str> {
    match &effect.request {
        Request::Net(net::Request::Connect { .. } | net::Request::Accept { .. }) => {
            Some("what passed over a connection cannot be told again")
        }
        _ if result.value["body"] == NOT_KEPT => Some("its answer was too long to be kept"),
        _ => None,
    }
}

impl Handler for Resumed {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        let Some(result) = self.take(effect) else { return next.run(effect) };
        if let Some(lost) = lost(effect, &result) {
            let run = self.runs.first().map_or("another run", |run| run.0.as_str());
            return Box::pin(std::future::ready(Answer::refused(
                NAME,
                format!(
                    "{} `{}` was done by run {run}, which was interrupted, and {lost}",
                    effect.kind, effect.resource
                ),
                "it is never done twice by itself; start the program anew, without `tollgate resume`, to do it again",
            )));
        }
        let body = match result.body.as_deref().map(hex::decode).transpose() {
            Ok(body) => body,
            Err(error) => {
                // Not done again: nobody may conclude from an unreadable result that nothing happened.
                let reason = format!("what came of {} of `{}` cannot be read: {error}", effect.kind, effect.resource);
                return Box::pin(std::future::ready(Answer::refused(NAME, reason, "`tollgate verify` the run")));
            }
        };
        let answer = Answer {
            decision: Decision::Answered,
            decided_by: NAME,
            reason: match self.runs.first() {
                Some(run) => format!("done by run {run}, which was interrupted; never done twice"),
                None => String::new(),
            },
            body,
            digest: result.digest,
            ..Answer::done(result.value, result.bytes)
        };
        Box::pin(std::future::ready(answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{
            receipts::Receipts,
            testing::{ask, wait, FakeWorld, WorldOf},
        },
        effect::{
            tests::{at_network, connect, http, request_of, sample},
            Kind,
        },
        ledger::tests::Fixture,
    };
    use std::sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    };

    fn once() -> Effect {
        Effect { door: Door::Api, ..sample(Kind::RunStart) }
    }

    #[test]
    fn what_was_done_is_answered_and_what_comes_after_it_is_done() {
        let fixture = Fixture::new();
        let count = AtomicU64::new(0);
        let world = WorldOf(|_: &Effect| {
            let number = count.fetch_add(1, Ordering::SeqCst);
            Answer { body: Some(vec![number as u8]), ..Answer::done(number.into(), 1) }
        });
        let receipts = || Arc::new(Receipts::new(fixture.ledger.clone(), fixture.run.clone())) as Arc<dyn Handler>;
        // The interrupted run did it twice, and something that may be repeated.
        for effect in [once(), once(), Effect { door: Door::Api, ..sample(Kind::FsWrite) }] {
            wait(ask(vec![receipts()], &effect, &world));
        }
        let results = fixture.ledger.once_results(&fixture.run).unwrap();
        assert_eq!(results.len(), 2);
        let resumed = Arc::new(Resumed::new(vec![fixture.run.clone()], results));
        let answers: Vec<Answer> =
            (0..3).map(|_| wait(ask(vec![receipts(), resumed.clone()], &once(), &world))).collect();
        let told: Vec<(Decision, serde_json::Value, Option<Vec<u8>>)> =
            answers.into_iter().map(|answer| (answer.decision, answer.value, answer.body)).collect();
        assert_eq!(told[0], (Decision::Answered, 0.into(), Some(vec![0])));
        assert_eq!(told[1], (Decision::Answered, 1.into(), Some(vec![1])));
        assert_eq!(told[2].0, Decision::Allowed);
        assert_eq!(count.load(Ordering::SeqCst), 4);
        // What was answered is not kept again, what was done is.
        assert_eq!(fixture.ledger.once_results(&fixture.run).unwrap().len(), 3);
    }

    #[test]
    fn an_effect_on_the_run_itself_is_known_by_the_interrupted_runs_id() {
        let of = |id: &str| Effect {
            resource: Resource::Run { id: id.to_owned() },
            subject: crate::effect::Subject { uid: 0, run: Some(RunId(id.to_owned())), agent: None },
            ..once()
        };
        let runs = vec![RunId("b".into()), RunId("a".into())];
        let resumed = Arc::new(Resumed::new(runs, vec![(of("a").digest(), OnceResult::default())]));
        let world = FakeWorld::default();
        let decisions: Vec<Decision> =
            (0..2).map(|_| wait(ask(vec![resumed.clone()], &of("c"), &world)).decision).collect();
        assert_eq!(decisions, [Decision::Answered, Decision::Allowed]);
    }

    #[test]
    fn a_request_that_must_not_be_repeated_is_answered_and_one_that_may_be_is_made() {
        let fixture = Fixture::new();
        let receipts = || Arc::new(Receipts::new(fixture.ledger.clone(), fixture.run.clone())) as Arc<dyn Handler>;
        let long = "https://api.test/long";
        let world = WorldOf(|effect: &Effect| {
            let body = if effect.resource.to_string() == long { vec![0; 5 << 20] } else { b"made".to_vec() };
            Answer { body: Some(body), ..Answer::done(serde_json::json!({"status": 201, "headers": []}), 4) }
        });
        let post = |url: &str| {
            let request = request_of("POST", url, b"x");
            at_network(Kind::HttpRequest, request.resource(), Request::Http(request))
        };
        let effects =
            [post("https://api.test/items"), http("PUT", "https://api.test/1"), connect("db.test", 5432), post(long)];
        for effect in &effects {
            assert!(wait(ask(vec![receipts()], effect, &world)).is_success());
        }
        let results = fixture.ledger.once_results(&fixture.run).unwrap();
        assert_eq!(results.len(), 3);
        let resumed = Arc::new(Resumed::new(vec![fixture.run.clone()], results));
        let again: Vec<Answer> =
            effects.iter().map(|effect| wait(ask(vec![resumed.clone()], effect, &world))).collect();
        let decisions: Vec<Decision> = again.iter().map(|answer| answer.decision).collect();
        assert_eq!(decisions, [Decision::Answered, Decision::Allowed, Decision::Refused, Decision::Refused]);
        assert_eq!((again[0].body.as_deref(), &again[0].value["status"]), (Some(&b"made"[..]), &201.into()));
        assert!(again[2].reason.contains("cannot be told again"), "{:?}", again[2]);
        assert!(again[3].reason.contains("too long to be kept"), "{:?}", again[3]);
    }

    #[test]
    fn another_request_and_another_door_know_nothing_of_it() {
        let resumed = Arc::new(Resumed::new(vec![RunId("a".into())], vec![(once().digest(), OnceResult::default())]));
        let world = FakeWorld::default();
        let other = Effect { door: Door::Api, ..sample(Kind::FsWrite) };
        for effect in [&other, &Effect { door: Door::Control, ..once() }] {
            assert_eq!(wait(ask(vec![resumed.clone()], effect, &world)).decision, Decision::Allowed);
        }
        assert_eq!(wait(ask(vec![resumed], &once(), &world)).decision, Decision::Answered);
    }
}
