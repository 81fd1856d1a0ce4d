//! The program's door: system calls that wait for the chain's answer before the kernel runs them.
//!
//! Open only for a run that wants it, by fault rules on what its program does itself or by receipts of opens; else no
//! call waits. Each call becomes one effect, is answered with an error number or let go on, and has one receipt. Calls
//! that wait do not wait for each other. The door decides nothing, and is no wall: see [`crate::effect::program`].

use crate::{
    chain::{Answer, BoxFuture, Chain, Decision, World},
    effect::{self, errno, program, Door, Effect, Kind, Request, Resource},
    jail::seccomp::syscall_name,
    service::denials,
};
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::{mpsc, watch};
use tollgate_shim::protocol::{Asked, Asking, Denied, Wanted};

/// What a waiting call gets: this error number, or none to go on.
pub type Reply = Box<dyn FnOnce(Option<i32>) + Send>;

/// A call that waits.
pub struct Question {
    /// The call.
    pub asked: Asked,
    /// Where its answer goes.
    pub reply: Reply,
}

/// The kinds of effects that come by this door, with what the shim calls them.
pub const KINDS: [(Kind, Asking); 7] = [
    (Kind::FsRead, Asking::Read),
    (Kind::FsList, Asking::List),
    (Kind::FsWrite, Asking::Write),
    (Kind::FsDelete, Asking::Delete),
    (Kind::FsMove, Asking::Move),
    (Kind::ProcessExec, Asking::Execute),
    (Kind::NetConnect, Asking::Connect),
];

/// Answers calls until the channel or the door closes. A call that nobody has answered by then is one of a jail that
/// is gone.
pub async fn serve(
    mut questions: mpsc::UnboundedReceiver<Question>,
    chain: Arc<Chain>,
    context: Arc<denials::Context>,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let question = tokio::select! {
            question = questions.recv() => question,
            _ = closed.wait_for(|closed| *closed) => return,
        };
        let Some(Question { asked, reply }) = question else { return };
        let (chain, context) = (Arc::clone(&chain), Arc::clone(&context));
        tokio::spawn(async move { reply(answer(&chain, &asked, &context).await) });
    }
}

async fn answer(chain: &Chain, asked: &Asked, context: &denials::Context) -> Option<i32> {
    let (effect, refusal) = effect_of(asked, context)?;
    let kernel = Kernel { refusal: Mutex::new(refusal) };
    let answer = chain.perform(&effect, &kernel).await;
    errno_of(&answer)
}

/// What the program sees: the error number that the answer names, else the natural one of a refusal or failure.
fn errno_of(answer: &Answer) -> Option<i32> {
    if answer.is_success() {
        return None;
    }
    let named = answer.value.pointer("/error/errno").and_then(|name| errno(name.as_str()?));
    Some(named.unwrap_or(match answer.decision {
        Decision::Refused => libc::EACCES,
        Decision::Failed | Decision::InDoubt | Decision::Allowed | Decision::Answered | Decision::Planned => libc::EIO,
    }))
}

/// The effect that a call is, and for one that is going to be refused by a layer of the jail, the refusal. None for
/// what is no effect, and goes on.
fn effect_of(asked: &Asked, context: &denials::Context) -> Option<(Effect, Option<Answer>)> {
    let (kind, _) = KINDS.iter().find(|(_, asking)| *asking == asked.wanted)?;
    let syscall = syscall_name(asked.syscall).map_or_else(|| asked.syscall.to_string(), str::to_owned);
    let object = asked.object.to_path();
    let (resource, refusal) = match asked.wanted {
        Asking::Connect => {
            let denied = Denied {
                syscall: asked.syscall,
                access: Wanted::Connect,
                object: asked.object.clone(),
                errno: asked.refused_with?,
                pid: asked.pid,
                comm: asked.comm.clone(),
                times: 1,
            };
            let (effect, mut refusal) = denials::judge(&denied, context)?;
            let name = format!("{:?}", nix::errno::Errno::from_raw(denied.errno));
            // What the layer's refusal is to the program, also where a replay answers in its place.
            refusal.value = serde_json::json!({ "error": { "errno": name } });
            (effect.resource, Some(refusal))
        }
        Asking::Read | Asking::List | Asking::Write | Asking::Delete | Asking::Move | Asking::Execute => {
            (resource_of(&object, &context.workspace), None)
        }
    };
    let to = asked.to.as_ref().map(|to| match resource_of(&to.to_path(), &context.workspace) {
        Resource::Workspace { path } | Resource::Host { path } => path,
        other => other.to_string(),
    });
    let effect = Effect {
        kind: *kind,
        resource,
        subject: context.subject.clone(),
        room: context.room.clone(),
        door: Door::Program,
        request: Request::Program(program::Request { syscall, to }),
    };
    Some((effect, refusal))
}

fn resource_of(path: &Path, workspace: &Path) -> Resource {
    let inside = path.strip_prefix(workspace).ok().and_then(|inside| effect::path::workspace_path(inside).ok());
    match inside {
        Some(path) => Resource::Workspace { path },
        None => Resource::Host { path: denials::spelled(path) },
    }
}

/// The world of this door: lets the kernel go on, or says what the jail's layer is going to say.
struct Kernel {
    refusal: Mutex<Option<Answer>>,
}

impl World for Kernel {
    fn execute<'a>(&'a self, _effect: &'a Effect) -> BoxFuture<'a, Answer> {
        let refusal = self.refusal.lock().unwrap_or_else(PoisonError::into_inner).take();
        let answer = refusal.unwrap_or_else(|| Answer::done(serde_json::Value::Null, 0));
        Box::pin(std::future::ready(answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effect::Subject;

    fn context() -> denials::Context {
        let subject = Subject { uid: 1000, run: None, agent: None };
        denials::Context {
            workspace: "/w".into(),
            read_only: false,
            shared_git: None,
            subject,
            room: None,
            network: false,
        }
    }

    fn asked(wanted: Asking, object: &str) -> Asked {
        Asked {
            id: 1,
            syscall: libc::SYS_openat,
            wanted,
            object: object.into(),
            to: None,
            refused_with: None,
            pid: 2,
            comm: "sh".into(),
        }
    }

    #[test]
    fn equal_calls_of_different_processes_are_equal_requests() {
        let one = effect_of(&asked(Asking::Write, "/w/a"), &context()).unwrap().0;
        let other = Asked { id: 9, pid: 77, comm: "bash".into(), ..asked(Asking::Write, "/w/a") };
        assert_eq!(effect_of(&other, &context()).unwrap().0.digest(), one.digest());
        assert_eq!((one.kind, one.resource), (Kind::FsWrite, Resource::Workspace { path: "a".into() }));
    }

    #[test]
    fn a_connection_that_leads_nowhere_is_refused_by_the_layer_and_keeps_its_errno() {
        let call = Asked { refused_with: Some(libc::ENETUNREACH), ..asked(Asking::Connect, "192.0.2.1:80") };
        let (effect, refusal) = effect_of(&call, &context()).unwrap();
        assert_eq!(effect.resource, Resource::Address { to: "192.0.2.1:80".into() });
        assert_eq!(errno_of(&refusal.unwrap()), Some(libc::ENETUNREACH));
    }

    #[test]
    fn a_refusal_is_eacces_and_a_named_error_is_itself() {
        assert_eq!(errno_of(&Answer::refused("admission", "", "")), Some(libc::EACCES));
        let value = serde_json::json!({"error": {"errno": "ENOSPC"}});
        assert_eq!(errno_of(&Answer { value, ..Answer::failed("", "") }), Some(libc::ENOSPC));
        assert_eq!(errno_of(&Answer::failed("", "")), Some(libc::EIO));
        assert_eq!(errno_of(&Answer::done(serde_json::Value::Null, 0)), None);
    }
}
