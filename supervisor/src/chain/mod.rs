//! The chain: what an effect passes on its way to the world.
//!
//! Outermost first: **receipts → admission → authority → quota → containment → answering handlers in the order given
//! → approval → world**. Approval is innermost, so a person is asked only for what would really happen. The order
//! stands here and nowhere else; a policy cannot change it.

pub mod admission;
pub mod approval;
pub mod authority;
pub mod containment;
pub mod faults;
pub mod preflight;
pub mod quota;
pub mod receipts;
pub mod record;
pub mod recording;
pub mod replay;
pub mod resume;
pub mod secrets;
pub mod stack;

use crate::effect::{Digest, Effect};
use serde::{Deserialize, Serialize};
use std::{
    future::Future,
    pin::Pin,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

/// A boxed future, as handlers return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// One step of the chain: it answers, refuses, or forwards with [`Next::run`].
pub trait Handler: Send + Sync {
    /// The name that `decided_by` shows.
    fn name(&self) -> &'static str;

    /// Handles one effect. Forwarding consumes `next`, so a handler cannot forward twice.
    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer>;
}

/// The innermost step: the code that really does the thing.
pub trait World: Send + Sync {
    /// Does the effect, whatever it is. Only the chain calls this.
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer>;

    /// Gives whoever waits an answer that a handler has in the world's place, where that takes more than handing it
    /// over: a conversation is held, and can come out otherwise, which is the answer then. Nothing is done.
    fn give<'a>(&'a self, _effect: &'a Effect, answer: Answer) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::ready(answer))
    }
}

/// What lies further in. Consumed by forwarding, so a handler forwards once
///
/// ```
/// # use tollgate::{chain::{Answer, Next}, effect::Effect};
/// async fn once(effect: &Effect, next: Next<'_>) -> Answer {
///     next.run(effect).await
/// }
/// ```
///
/// and not twice:
///
/// ```compile_fail,E0382
/// # use tollgate::{chain::{Answer, Next}, effect::Effect};
/// async fn twice(effect: &Effect, next: Next<'_>) -> Answer {
///     next.run(effect).await;
///     next.run(effect).await
/// }
/// ```
pub struct Next<'a> {
    rest: &'a [Arc<dyn Handler>],
    world: &'a dyn World,
    /// Microseconds that handlers spent waiting, where receipts are kept.
    waited: Option<&'a AtomicU64>,
    /// What a person must agree to before the world is reached.
    asked: Option<Question>,
    /// Who waits for the answer, where one can go away.
    asker: Option<&'a dyn Asker>,
}

/// What a person must agree to. An effect that carries one never reaches the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The rule that asks.
    pub origin: admission::Origin,
}

/// Whoever waits for an effect's answer.
pub trait Asker: Send + Sync {
    /// Is ready when nobody waits any more, and not before.
    fn gone<'a>(&'a self) -> BoxFuture<'a, ()>;
}

impl<'a> Next<'a> {
    /// Forwards the effect to the next handler, or to the world. With a question that nobody took, the world is not
    /// reached: a chain without an approval step refuses what it would have to ask about.
    pub fn run(self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        match self.rest.split_first() {
            Some((handler, rest)) => handler.handle(effect, Next { rest, ..self }),
            None => match &self.asked {
                Some(question) => Box::pin(std::future::ready(approval::unanswered(effect, question))),
                None => self.world.execute(effect),
            },
        }
    }

    /// Ends the way in, and gives the asker this answer in the world's place.
    fn give(self, effect: &'a Effect, answer: Answer) -> BoxFuture<'a, Answer> {
        self.world.give(effect, answer)
    }

    /// Forwards with something that a person must agree to further in. The first question stays: a person is asked
    /// once.
    #[must_use]
    pub fn asking(self, question: Question) -> Next<'a> {
        Next { asked: self.asked.or(Some(question)), ..self }
    }

    /// Takes the question out, for the one handler that answers it.
    fn take_question(&mut self) -> Option<Question> {
        self.asked.take()
    }

    /// Is ready when whoever asked waits no more; never, where that cannot be known.
    async fn asker_gone(asker: Option<&dyn Asker>) {
        match asker {
            Some(asker) => asker.gone().await,
            None => std::future::pending().await,
        }
    }

    /// Notes that the handler waited, for a person or for its turn, which the receipt shows apart from deciding.
    pub fn note_waiting(&self, waited: Duration) {
        if let Some(sum) = self.waited {
            sum.fetch_add(u64::try_from(waited.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

/// A stack of handlers in their normal order, ready to be asked.
pub struct Chain {
    handlers: Vec<Arc<dyn Handler>>,
}

impl Chain {
    /// A chain of these handlers, outermost first. The caller is [`stack`], which puts them in order.
    pub(crate) fn new(handlers: Vec<Arc<dyn Handler>>) -> Chain {
        Chain { handlers }
    }

    /// A chain of one handler and no receipts, to measure what the handler costs. No release has this.
    #[cfg(feature = "test-switches")]
    pub fn alone(handler: Option<Arc<dyn Handler>>) -> Chain {
        Chain::new(handler.into_iter().collect())
    }

    /// Passes one effect through every handler and, if all forward, to the world.
    pub async fn perform(&self, effect: &Effect, world: &dyn World) -> Answer {
        self.pass(effect, world, None).await
    }

    /// As [`Chain::perform`], for somebody who may go away meanwhile: a question that waits for a person is withdrawn
    /// then.
    pub async fn perform_for(&self, effect: &Effect, world: &dyn World, asker: &dyn Asker) -> Answer {
        self.pass(effect, world, Some(asker)).await
    }

    async fn pass(&self, effect: &Effect, world: &dyn World, asker: Option<&dyn Asker>) -> Answer {
        Next { rest: &self.handlers, world, waited: None, asked: None, asker }.run(effect).await
    }

    /// The handlers' names, outermost first, in one line.
    pub fn describe(&self) -> String {
        self.names().join(" → ")
    }

    /// The handlers' names, outermost first, and `world` at the end.
    pub fn names(&self) -> Vec<&'static str> {
        self.handlers.iter().map(|handler| handler.name()).chain(["world"]).collect()
    }
}

/// What was decided about an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// The world did it.
    Allowed,
    /// A handler said no, and nothing happened.
    Refused,
    /// A handler answered in the world's place.
    Answered,
    /// It would have happened, and is written down.
    Planned,
    /// It was allowed, and the world failed.
    Failed,
    /// Its intent is on disk and its completion is not: it may or may not have happened.
    InDoubt,
}

/// What came of an effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The decision.
    pub decision: Decision,
    /// The handler that decided, or `world`.
    pub decided_by: &'static str,
    /// Why, in one sentence naming the object; empty when allowed.
    pub reason: String,
    /// What to change for it to be allowed; empty when allowed.
    pub hint: String,
    /// The rule behind the decision, with the place where it is written, as in
    /// `python.toml:12 deny fs/write on "**/.env"`; none where no rule had a part in it.
    pub rule: Option<String>,
    /// Whether a fault handler made this up.
    pub injected: bool,
    /// The result as data, for the one who asked.
    pub value: serde_json::Value,
    /// The result's bytes, where the result is bytes.
    pub body: Option<Vec<u8>>,
    /// Digest of the result.
    pub digest: Option<Digest>,
    /// How many bytes were read or written.
    pub bytes: u64,
    /// Whether the answer breaks off half way, where it goes over a connection: only ever a fault's doing.
    pub cut: bool,
}

impl Answer {
    /// The world did it.
    pub fn done(value: serde_json::Value, bytes: u64) -> Answer {
        Answer {
            decision: Decision::Allowed,
            decided_by: "world",
            reason: String::new(),
            hint: String::new(),
            rule: None,
            injected: false,
            value,
            body: None,
            digest: None,
            bytes,
            cut: false,
        }
    }

    /// A handler refuses: why, on which object, and what to change.
    pub fn refused(by: &'static str, reason: impl Into<String>, hint: impl Into<String>) -> Answer {
        Answer {
            decision: Decision::Refused,
            decided_by: by,
            reason: reason.into(),
            hint: hint.into(),
            ..Answer::done(serde_json::Value::Null, 0)
        }
    }

    /// The world was asked and failed.
    pub fn failed(reason: impl Into<String>, hint: impl Into<String>) -> Answer {
        Answer { decision: Decision::Failed, ..Answer::refused("world", reason, hint) }
    }

    /// The same, decided by this rule. One that a handler further in has named stays.
    #[must_use]
    pub fn by_rule(mut self, rule: impl Into<String>) -> Answer {
        self.rule.get_or_insert_with(|| rule.into());
        self
    }

    /// Whether the asker got what it asked for.
    pub fn is_success(&self) -> bool {
        match self.decision {
            Decision::Allowed | Decision::Answered | Decision::Planned => true,
            Decision::Refused | Decision::Failed | Decision::InDoubt => false,
        }
    }
}

#[cfg(test)]
mod laws;
#[cfg(test)]
mod testing;
