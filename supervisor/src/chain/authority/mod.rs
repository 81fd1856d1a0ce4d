//! Authority: may this subject do this to that place?
//!
//! Built into every chain, directly after admission, by [`super::stack::Stack::build`]; no stack, policy or request
//! takes it out. The decision is the pure function [`can`] over [`Relations`]; this handler only finds out which
//! place an effect is about and what it does to it.
//!
//! A run without a room acts from a place of its own: its workspace and itself. Rooms bring further relations when
//! they exist; until then nothing leads from one run to another. An operator, a subject without a run, keeps the reach
//! that the kernel vouches for: over the runs of the same user, and, as root, over every run.
//!
//! What it refuses: a subject of another user, a subject that is another run, and whatever reaches for another run or
//! a room that it has no relation to.

mod relations;

pub use relations::{can, Action, Grant, Grantor, Ground, Lack, Place, RelationError, Relations, Ruling};

use super::{Answer, BoxFuture, Handler, Next};
use crate::{
    effect::{run, Effect, Kind, Request, Resource, RunId, Subject},
    ledger::Timestamp,
};

const NAME: &str = "authority";

/// The handler, for the effects of one run.
pub struct Authority {
    run: RunId,
    owner: u32,
    relations: Relations,
}

impl Authority {
    /// For a run of this user that has no relations but to itself.
    pub fn new(run: RunId, owner: u32) -> Authority {
        Authority { run, owner, relations: Relations::default() }
    }

    /// Why the effect is refused, if it is.
    fn lack(&self, effect: &Effect) -> Option<String> {
        let Subject { uid, run, .. } = &effect.subject;
        let Some(run) = run else {
            // The operator's user is the kernel's word; root reaches every run on its host as it is.
            return (*uid != self.owner && *uid != 0)
                .then(|| format!("user {uid} is not user {}, whose run {} is", self.owner, self.run));
        };
        if *uid != self.owner || *run != self.run {
            return Some(format!("run {run} of user {uid} is not run {} of user {}", self.run, self.owner));
        }
        let subject = Place::Run(self.run.clone());
        let (action, object) = (action(effect.kind), self.object(effect));
        // Without a relation nothing depends on the time.
        let ruling = can(&self.relations, &subject, action, &object, Timestamp(0));
        ruling.err().map(|lack| format!("{subject} may not {action} {object}: {lack}"))
    }

    /// The place that the effect is about. Where resource and request disagree, it is the one that is not the run's own.
    fn object(&self, effect: &Effect) -> Place {
        if let Some(room) = &effect.room {
            return Place::Room(room.clone());
        }
        let named = match &effect.request {
            Request::Run(run::Request::Cancel { run }) => Some(run),
            Request::Run(run::Request::Start { .. } | run::Request::Eval { .. })
            | Request::Fs(_)
            | Request::Jail(_)
            | Request::Program(_)
            | Request::Api(_)
            | Request::Net(_)
            | Request::Http(_) => None,
        };
        let resource = match &effect.resource {
            Resource::Run { id } => Some(id),
            Resource::Workspace { .. }
            | Resource::Host { .. }
            | Resource::Address { .. }
            | Resource::Syscall { .. }
            | Resource::Url { .. } => None,
        };
        let foreign = [resource, named].into_iter().flatten().find(|id| **id != self.run.0);
        Place::Run(foreign.map_or_else(|| self.run.clone(), |id| RunId(id.clone())))
    }
}

/// What a kind does to the place that it is about.
fn action(kind: Kind) -> Action {
    match kind {
        Kind::FsRead | Kind::FsList | Kind::ApiRequest => Action::Read,
        Kind::FsWrite | Kind::FsDelete | Kind::FsMove => Action::Write,
        // A run lies beneath the one that starts it, and ends by its own word or by that of one above it.
        Kind::RunStart | Kind::RunCancel | Kind::EvalRun => Action::Write,
        // What leaves the jail changes nothing of rooms and runs; where it may go is admission's question.
        Kind::NetConnect | Kind::NetResolve | Kind::NetAccept | Kind::HttpRequest => Action::Read,
        // They touch nothing but the jail of the run itself, and admission refuses them further out.
        Kind::ProcessExec | Kind::ProcessSyscall => Action::Read,
    }
}

impl Handler for Authority {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        match self.lack(effect) {
            None => next.run(effect),
            Some(lack) => Box::pin(std::future::ready(Answer::refused(
                NAME,
                format!("{} {}: {lack}", effect.kind, effect.resource),
                "act on what is the run's own, or ask the person outside; no policy can allow this",
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{
            quota::Meters,
            stack::{Element, Stack, Wiring},
            testing::{ask, wait, FakeWorld},
            Decision,
        },
        effect::{tests::sample, RoomId},
        ledger::tests::Fixture,
    };
    use std::sync::Arc;

    const OWNER: u32 = 1000;

    fn run_id(id: &str) -> RunId {
        RunId(id.to_owned())
    }

    fn own(kind: Kind) -> Effect {
        let mut effect = sample(kind);
        effect.subject = Subject { uid: OWNER, run: Some(run_id("aaaaaaaaaaa1")), agent: None };
        effect.room = None;
        if let Resource::Run { id } = &mut effect.resource {
            "aaaaaaaaaaa1".clone_into(id);
        }
        if let Request::Run(run::Request::Cancel { run }) = &mut effect.request {
            "aaaaaaaaaaa1".clone_into(run);
        }
        effect
    }

    fn answer(effect: &Effect) -> Answer {
        let handler: Arc<dyn Handler> = Arc::new(Authority::new(run_id("aaaaaaaaaaa1"), OWNER));
        let world = FakeWorld::default();
        let answer = wait(ask(vec![handler], effect, &world));
        assert_eq!(world.done.lock().unwrap().len(), usize::from(answer.is_success()));
        answer
    }

    #[test]
    fn a_run_acts_on_its_own_workspace_and_on_itself() {
        for kind in [Kind::FsRead, Kind::FsWrite, Kind::FsMove, Kind::FsDelete, Kind::RunCancel, Kind::EvalRun] {
            assert!(answer(&own(kind)).is_success(), "{kind}");
        }
    }

    #[test]
    fn a_run_acts_on_nothing_of_another_run_or_room() {
        let mut named = own(Kind::RunCancel);
        named.request = Request::Run(run::Request::Cancel { run: "bbbbbbbbbbb1".into() });
        let resource = Effect { resource: Resource::Run { id: "bbbbbbbbbbb1".into() }, ..own(Kind::RunCancel) };
        let room = Effect { room: Some(RoomId("other".into())), ..own(Kind::FsRead) };
        let mut stranger = own(Kind::FsWrite);
        stranger.subject.run = Some(run_id("bbbbbbbbbbb1"));
        for effect in [named, resource, room, stranger] {
            let answer = answer(&effect);
            assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "authority"), "{effect:?}");
            assert!(!answer.reason.is_empty() && !answer.hint.is_empty());
        }
    }

    #[test]
    fn an_operator_keeps_its_reach_over_its_own_runs_and_no_other_users() {
        let by = |uid| Effect { subject: Subject { uid, run: None, agent: None }, ..own(Kind::FsWrite) };
        assert!(answer(&by(OWNER)).is_success());
        assert!(answer(&by(0)).is_success(), "root");
        assert!(!answer(&by(OWNER + 1)).is_success());
        let mut run_of_another = own(Kind::FsWrite);
        run_of_another.subject.uid = 0;
        assert!(!answer(&run_of_another).is_success(), "a run's user is its owner, whoever that is");
    }

    /// AU12.
    #[test]
    fn no_stack_is_built_without_it() {
        let fixture = Fixture::new();
        let meters = Meters::default();
        let wiring = Wiring { ledger: &fixture.ledger, run: &fixture.run, owner: OWNER, meters: &meters };
        let stacks = [
            Stack(vec![Element::Admission(crate::chain::admission::Admission::everything())]),
            Stack(vec![Element::Receipts, Element::Admission(crate::chain::admission::Admission::nothing())]),
        ];
        for stack in stacks {
            let chain = stack.build(&wiring).unwrap();
            assert_eq!(chain.describe(), "receipts → admission → authority → world");
        }
    }
}
