//! `tollgate kill`: end runs.

use super::{output::Failure, standing};
use crate::{
    doors::control::{self, parse_signal, ClientError},
    effect::RunId,
    ledger::record::{OutcomeType, RunState},
};
use nix::sys::signal::Signal;
use std::{io::Write, path::Path, process::ExitCode, time::Duration};

/// How long a killed run may take to be gone: its processes die at once, its receipts are written and its changes
/// are held.
const GONE: Duration = Duration::from_secs(10);

/// End runs, with everything in their jails.
///
/// SIGKILL, the default, ends the whole jail, and the command returns once it is gone. Any other signal goes to the
/// program, which may ignore it.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The runs: ids, unique beginnings of one, or `latest`
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<String>,
    /// The signal, by its name or number
    #[arg(long, short, default_value = "SIGKILL", value_parser = signal)]
    pub signal: Signal,
    /// Print one JSON object for each run
    #[arg(long)]
    pub json: bool,
}

fn signal(text: &str) -> Result<Signal, String> {
    parse_signal(text).ok_or_else(|| "no such signal; give a name like TERM or a number like 15".to_owned())
}

/// What became of one run.
struct Done {
    run: RunId,
    /// `gone` or `signaled`.
    result: &'static str,
    /// In words.
    said: String,
}

/// Ends each of the runs, and says what became of it to `talk`, or as JSON to `out`.
///
/// # Errors
/// The first failure, after every run was tried.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut first = None;
    for run in &args.runs {
        match kill(run, args.signal, state) {
            Ok(Done { run, result, said }) if args.json => {
                let signal = args.signal.as_str();
                let object = serde_json::json!({ "run": run, "signal": signal, "result": result, "detail": said });
                writeln!(out, "{object}")?;
            }
            Ok(done) => {
                // Nothing depends on the talk being heard.
                let _ = writeln!(talk, "{}", done.said);
            }
            Err(failure) if first.is_none() => first = Some(failure),
            Err(failure) => {
                let _ = write!(talk, "{failure}");
            }
        }
    }
    first.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn kill(run: &str, signal: Signal, state: &Path) -> Result<Done, Failure> {
    let (ledger, before) = standing::find(state, run)?;
    let id = &before.id;
    let done = |result, said| Ok(Done { run: id.clone(), result, said });
    if before.state == RunState::Ended {
        return match &before.outcome {
            Some(outcome) if outcome.kind == OutcomeType::Interrupted => {
                done("gone", format!("run {id} is gone: its supervisor died, and every process of its jail with it"))
            }
            Some(_) | None => Err(Failure::new(format!("run {id} is over already: {}", standing::word(&before)), "")),
        };
    }
    let body = serde_json::json!({"signal": signal.as_str()});
    let asked = standing::block_on(control::ask(&ledger.run_dir(id), "/v1/kill", Some(&body)))?;
    match asked {
        Ok(_) => {}
        // It may have ended, or its supervisor have died, meanwhile; the record will say.
        Err(ClientError::Unreachable(_) | ClientError::Broken(_)) if signal == Signal::SIGKILL => {}
        Err(cause) => return Err(Failure::control(&id.0, &cause)),
    }
    if signal != Signal::SIGKILL {
        return done("signaled", format!("run {id} was sent {signal}"));
    }
    let after = standing::wait(&ledger, id, GONE)?;
    if after.state == RunState::Ended {
        return done("gone", format!("run {id} is gone: {}", standing::word(&after)));
    }
    let hint = format!("its supervisor is process {}; ending that ends the jail too", before.supervisor_pid);
    Err(Failure::new(format!("run {id} was not gone within {} s", GONE.as_secs()), hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cli::ps::tests::ledger_with_two_runs,
        doors::control::{Controlled, Stream},
        ledger::{
            record::{Outcome, Receipt, RunRecord},
            Ledger,
        },
    };
    use std::{io, sync::Arc};

    fn said(args: &Args, ledger: &Ledger) -> Result<String, Failure> {
        let mut talk = Vec::new();
        run(args, ledger.state(), &mut Vec::new(), &mut talk)?;
        Ok(String::from_utf8(talk).expect("is text"))
    }

    #[test]
    fn a_run_without_a_supervisor_is_written_down_as_interrupted() {
        let (_root, ledger) = ledger_with_two_runs();
        let args = Args { runs: vec!["aaa".to_owned()], signal: Signal::SIGKILL, json: false };
        assert!(said(&args, &ledger).expect("is gone").contains("aaaaaaaaaaa1 is gone"));
        let outcome = ledger.run("aaa").expect("is there").outcome.expect("has one");
        assert_eq!(outcome.kind, OutcomeType::Interrupted);
    }

    #[test]
    fn every_run_is_tried_and_the_first_failure_is_told() {
        let (_root, ledger) = ledger_with_two_runs();
        let args = Args { runs: vec!["nosuch".to_owned(), "aaa".to_owned()], signal: Signal::SIGTERM, json: false };
        let failure = said(&args, &ledger).expect_err("one is not there");
        assert!(failure.message.contains("nosuch"), "{failure}");
        assert_eq!(ledger.run("aaa").expect("is there").state, RunState::Ended);
    }

    /// A run that ends when it is told to.
    struct Obedient {
        ledger: Ledger,
        record: RunRecord,
    }

    impl Controlled for Obedient {
        fn record(&self) -> RunRecord {
            self.record.clone()
        }

        fn kill(&self, signal: Signal) -> io::Result<()> {
            let kind = OutcomeType::Killed;
            let signal = Some(signal as i32);
            let outcome = Outcome { kind, code: None, signal, limit: None, used: None, detail: None };
            let ended_at = Some(self.record.started_at.clone());
            let over = RunRecord { state: RunState::Ended, outcome: Some(outcome), ended_at, ..self.record.clone() };
            self.ledger.update_run(&over).map_err(io::Error::other)
        }

        fn receipts(&self, _after: u64, _limit: u64) -> io::Result<Vec<Receipt>> {
            Ok(Vec::new())
        }

        fn log(&self, _stream: Stream, _offset: u64, _limit: u64) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    #[test]
    fn a_killed_run_is_verified_to_be_gone() {
        let (_root, ledger) = ledger_with_two_runs();
        let record = ledger.run("bbb").expect("is there");
        let run_dir = ledger.run_dir(&record.id);
        std::fs::create_dir_all(&run_dir).expect("makes");
        let served: Arc<dyn Controlled> = Arc::new(Obedient { ledger: ledger.clone(), record });
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let door = std::thread::spawn(move || {
            standing::block_on(async move {
                let listener = control::bind(&run_dir).expect("binds");
                control::serve(listener, served, async move {
                    let _ = stopped.await;
                })
                .await;
            })
        });
        while !ledger.state().join("runs/bbbbbbbbbbb1/control.sock").exists() {
            std::thread::yield_now();
        }
        let args = Args { runs: vec!["bbb".to_owned()], signal: Signal::SIGKILL, json: false };
        assert_eq!(said(&args, &ledger).expect("is gone"), "run bbbbbbbbbbb1 is gone: killed 9\n");
        let again = said(&args, &ledger).expect_err("is over");
        assert!(again.message.contains("over already"), "{again}");
        drop(stop);
        door.join().expect("does not panic").expect("serves");
    }
}
