//! Fakes around a handler: an asker, a world and handlers of a few lines.

use super::{
    admission::{Admission, Home, Kinds, Layer, Origin, Paths, Rule, Target, Verdict},
    Answer, BoxFuture, Chain, Handler, Next, World,
};
use crate::effect::{Effect, Kind};
use serde_json::Value;
use std::sync::{Arc, Mutex};

/// A world that does all it is asked, and remembers it.
#[derive(Default)]
pub(super) struct FakeWorld {
    pub(super) done: Mutex<Vec<Effect>>,
}

impl World for FakeWorld {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        self.done.lock().unwrap().push(effect.clone());
        Box::pin(async move { Answer::done(Value::Null, effect.bytes()) })
    }
}

/// A world that is a function.
pub(super) struct WorldOf<F>(pub(super) F);

impl<F: Fn(&Effect) -> Answer + Send + Sync> World for WorldOf<F> {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move { (self.0)(effect) })
    }
}

/// Asks handlers, outermost first, about one effect.
pub(super) async fn ask(handlers: Vec<Arc<dyn Handler>>, effect: &Effect, world: &dyn World) -> Answer {
    Chain::new(handlers).perform(effect, world).await
}

/// Runs a future to its end.
pub(super) fn wait<T>(future: impl std::future::Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Admits effects of these kinds.
pub(super) fn admit(kinds: &[Kind]) -> Admission {
    let rule = Rule {
        verdict: Verdict::Allow,
        kinds: Kinds::Only(kinds.to_vec()),
        paths: Paths::Any,
        target: Target::default(),
        origin: Origin { file: "test.toml".into(), line: 1, text: "allow".into() },
    };
    Admission::of(Layer::new("test", Home::Builtin, vec![rule]))
}

/// Refuses, answers or forwards: by a function that gives an answer or none.
pub(super) struct Judge<F>(pub(super) &'static str, pub(super) F);

impl<F: Fn(&Effect) -> Option<Answer> + Send + Sync> Handler for Judge<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        match (self.1)(effect) {
            Some(answer) => Box::pin(async { answer }),
            None => next.run(effect),
        }
    }
}

/// Forwards, and remembers how it was answered.
#[derive(Default)]
pub(super) struct Recorder {
    pub(super) log: Mutex<Vec<(Kind, super::Decision)>>,
}

impl Handler for Recorder {
    fn name(&self) -> &'static str {
        "record"
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let answer = next.run(effect).await;
            self.log.lock().unwrap().push((effect.kind, answer.decision));
            answer
        })
    }
}
