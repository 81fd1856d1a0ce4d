//! What a jailed program can do about runs: end its own, and have an evaluation written down.
//!
//! It wraps the world of the other kinds. A run reaches no run but itself; starting another from within a jail is
//! refused, plainly and with a receipt.

use crate::{
    chain::{Answer, BoxFuture, World},
    effect::{run::Request as RunRequest, Effect, Request, RunId},
};
use std::sync::Arc;

/// The world of one run, with the run itself in it.
pub struct OwnRun {
    run: RunId,
    inner: Arc<dyn World>,
    cancel: Box<dyn Fn() -> std::io::Result<()> + Send + Sync>,
}

impl OwnRun {
    /// The run's own world. `cancel` begins to end the run, and returns at once.
    pub fn new(
        run: RunId,
        inner: Arc<dyn World>,
        cancel: impl Fn() -> std::io::Result<()> + Send + Sync + 'static,
    ) -> OwnRun {
        OwnRun { run, inner, cancel: Box::new(cancel) }
    }

    fn about_runs(&self, request: &RunRequest) -> Answer {
        match request {
            RunRequest::Start { .. } => Answer::refused(
                "world",
                format!("run {}: child runs are not available in this version", self.run),
                "start the command as a process of this run, or ask the person outside to start a run",
            ),
            RunRequest::Cancel { run } if *run == self.run.0 => match (self.cancel)() {
                Ok(()) => Answer::done(serde_json::json!({"run": run}), 0),
                Err(cause) => Answer::failed(format!("run {run} cannot be ended: {cause}"), "exit the program instead"),
            },
            RunRequest::Cancel { run } => Answer::refused(
                "world",
                format!("run {run} is not this run, {}", self.run),
                "a run can end itself only; leave `id` out",
            ),
            // An allowed effect's reason is the only place of a receipt that holds what was measured.
            RunRequest::Eval { label, cpu_us, wall_us } => Answer {
                reason: format!("{label}: {cpu_us} us of processor time, {wall_us} us of wall time"),
                ..Answer::done(serde_json::json!({"cpu_us": cpu_us, "wall_us": wall_us}), 0)
            },
        }
    }
}

impl World for OwnRun {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        match &effect.request {
            Request::Run(request) => Box::pin(std::future::ready(self.about_runs(request))),
            Request::Fs(_)
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_)
            | Request::Net(_)
            | Request::Http(_) => self.inner.execute(effect),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::Decision,
        effect::{Door, Kind, Resource, Subject},
    };
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Nothing;

    impl World for Nothing {
        fn execute<'a>(&'a self, _effect: &'a Effect) -> BoxFuture<'a, Answer> {
            unreachable!("effects on runs stay here")
        }
    }

    async fn answer(kind: Kind, request: RunRequest) -> (Answer, usize) {
        let cancelled = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&cancelled);
        let own = OwnRun::new(RunId("own".to_owned()), Arc::new(Nothing), move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        let effect = Effect {
            kind,
            resource: Resource::Run { id: "own".to_owned() },
            subject: Subject { uid: 1000, run: Some(RunId("own".to_owned())), agent: None },
            room: None,
            door: Door::Api,
            request: Request::Run(request),
        };
        (own.execute(&effect).await, cancelled.load(Ordering::SeqCst))
    }

    #[tokio::test]
    async fn a_run_ends_itself_and_no_other() {
        let (own, times) = answer(Kind::RunCancel, RunRequest::Cancel { run: "own".to_owned() }).await;
        assert_eq!((own.decision, times), (Decision::Allowed, 1));
        let (other, times) = answer(Kind::RunCancel, RunRequest::Cancel { run: "other".to_owned() }).await;
        assert_eq!((other.decision, times), (Decision::Refused, 0));
    }

    #[tokio::test]
    async fn a_child_run_is_refused_with_a_reason() {
        let request = RunRequest::Start {
            command: vec!["make".to_owned()],
            policy: String::new(),
            policy_digest: String::new(),
            directory: String::new(),
            environment: Vec::new(),
        };
        let (answer, _) = answer(Kind::RunStart, request).await;
        assert_eq!(answer.decision, Decision::Refused);
        assert!(answer.reason.contains("child runs"));
    }

    #[tokio::test]
    async fn an_evaluation_is_written_down_with_its_times() {
        let request = RunRequest::Eval { label: "main".to_owned(), cpu_us: 5, wall_us: 7 };
        let (answer, _) = answer(Kind::EvalRun, request).await;
        assert_eq!((answer.decision, answer.bytes), (Decision::Allowed, 0));
        assert_eq!(answer.reason, "main: 5 us of processor time, 7 us of wall time");
    }
}
