//! How a run ended: one outcome, one exit status and one line for each way, all decided here.
//!
//! Nothing here looks at the machine. The launcher gathers [`Facts`]; [`decide`] weighs them.

use super::enforcer::{Exceeded, LimitRefused};
use crate::ledger::record::{Outcome, OutcomeType};
use tollgate_shim::protocol::StepFailed;

/// The exit statuses that are Tollgate's own. A program's own status passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExitCode {
    /// Wall time used up: 124, as timeout(1) says it.
    WallExceeded = 124,
    /// The jail could not be built, the run was refused, its changes could not be applied, or its supervisor died
    /// under it: 125, as docker-run(1) and env(1) say that the fault is not the program's.
    NotDone = 125,
    /// The program was found and could not be executed: 126 (POSIX, Shell Command Language, 2.8.2).
    NotExecutable = 126,
    /// The program was not found: 127 (as 126).
    NotFound = 127,
    /// Memory used up: 137, 128 + SIGKILL, as the kernel's own out-of-memory kill looks to a shell.
    MemoryExceeded = 137,
    /// Processor time used up: 152, 128 + SIGXCPU.
    CpuExceeded = 152,
    /// It wrote more than it may: 153, 128 + SIGXFSZ.
    WriteExceeded = 153,
    /// It printed more than it may: 154, the next free number.
    OutputExceeded = 154,
    /// The process limit ended it: 155, the next free number.
    PidsExceeded = 155,
}

impl ExitCode {
    /// The number.
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// Why a run's program never ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotStarted {
    /// A step of building the jail failed.
    Step(StepFailed),
    /// A limit that was asked for cannot be enforced here.
    Limit(LimitRefused),
    /// The jail stood, and execve(2) of the program failed with this error number.
    Exec {
        /// The error number.
        errno: i32,
        /// The program, as the user named it.
        path: String,
    },
    /// Refused before anything was built: by policy, by a missing file, by a bug of ours. One sentence, with the
    /// remedy.
    Refused(String),
}

/// How the program ended, as wait(2) tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
    /// Nobody knows: the shim was killed with it.
    Unknown,
}

/// What is known when a run is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Facts {
    /// The program never ran.
    NotStarted(NotStarted),
    /// The program ran and ended.
    Ended {
        /// How, by the shim's report.
        ended: Ended,
        /// The limit for which the supervisor ended it, if it did.
        exceeded: Option<Exceeded>,
        /// The memory limit, if the kernel killed a process of the run for it.
        memory_kill: Option<Exceeded>,
        /// The limits that a signal can stand for: processor time and bytes written, with what was used.
        backstops: Backstops,
        /// The signal with which somebody killed the run, if somebody did.
        killed: Option<i32>,
        /// Why its changes could not be applied, if they could not.
        not_applied: Option<String>,
    },
    /// The supervisor died while it ran.
    Interrupted,
}

/// What the resource limits inside the jail stand for when their signal ends the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backstops {
    /// For SIGXCPU: processor time used and its limit, in microseconds.
    pub cpu: Option<(u64, u64)>,
    /// For SIGXFSZ: bytes written and their limit.
    pub write: Option<(u64, u64)>,
}

/// The one outcome that these facts make.
///
/// In this order: what never ran could not start; a limit's kill is that limit's whatever the program made of the
/// signal; an operator's kill is a kill; the main program killed by the kernel for memory, or by a backstop's signal,
/// is that limit's; changes that could not be applied; then how the program ended.
pub fn decide(facts: &Facts) -> Outcome {
    match facts {
        Facts::NotStarted(reason) => not_started(reason),
        Facts::Interrupted => Outcome {
            detail: Some("the supervisor died while the run went on; the jail ended with it".to_owned()),
            ..empty(OutcomeType::Interrupted)
        },
        Facts::Ended { ended, exceeded, memory_kill, backstops, killed, not_applied } => {
            if let Some(exceeded) = exceeded {
                return by_limit(exceeded);
            }
            if let Some(signal) = killed {
                return Outcome { signal: Some(*signal), ..empty(OutcomeType::Killed) };
            }
            if let Some(exceeded) = by_kernel(*ended, *memory_kill, backstops) {
                return by_limit(&exceeded);
            }
            if let Some(why) = not_applied {
                return Outcome { detail: Some(why.clone()), ..empty(OutcomeType::CouldNotApply) };
            }
            match ended {
                Ended::Exited(code) => Outcome { code: Some(*code), ..empty(OutcomeType::Exited) },
                Ended::Signaled(signal) => Outcome { signal: Some(*signal), ..empty(OutcomeType::Signaled) },
                Ended::Unknown => Outcome {
                    signal: Some(libc::SIGKILL),
                    detail: Some("the jail's first process was killed from outside, without Tollgate".to_owned()),
                    ..empty(OutcomeType::Signaled)
                },
            }
        }
    }
}

/// The limit that the kernel's signal stands for, if it stands for one.
fn by_kernel(ended: Ended, memory_kill: Option<Exceeded>, backstops: &Backstops) -> Option<Exceeded> {
    let backstop = |kind, numbers: Option<(u64, u64)>| numbers.map(|(used, limit)| Exceeded { kind, used, limit });
    match ended {
        Ended::Signaled(libc::SIGKILL) | Ended::Unknown => memory_kill,
        Ended::Signaled(libc::SIGXCPU) => backstop(OutcomeType::CpuExceeded, backstops.cpu),
        Ended::Signaled(libc::SIGXFSZ) => backstop(OutcomeType::WriteExceeded, backstops.write),
        Ended::Signaled(_) | Ended::Exited(_) => None,
    }
}

fn by_limit(exceeded: &Exceeded) -> Outcome {
    if exceeded.used == Exceeded::UNMEASURABLE {
        let detail = format!(
            "directories are nested more than {} deep, where what was written cannot be measured",
            super::watch::DEPTH_MAX
        );
        return Outcome { limit: Some(exceeded.limit), detail: Some(detail), ..empty(exceeded.kind) };
    }
    Outcome { limit: Some(exceeded.limit), used: Some(exceeded.used), ..empty(exceeded.kind) }
}

fn not_started(reason: &NotStarted) -> Outcome {
    let (code, detail) = match reason {
        NotStarted::Step(step) => (None, with_hint(&step.to_string(), &step.remedy)),
        NotStarted::Limit(limit) => (None, with_hint(&limit.to_string(), &limit.remedy)),
        NotStarted::Exec { errno, path } => {
            let code = match *errno {
                libc::ENOENT | libc::ENOTDIR => ExitCode::NotFound,
                _ => ExitCode::NotExecutable,
            };
            let why = std::io::Error::from_raw_os_error(*errno);
            (Some(i32::from(code.number())), format!("cannot execute `{path}`: {why}"))
        }
        NotStarted::Refused(why) => (None, why.clone()),
    };
    Outcome { code, detail: Some(detail), ..empty(OutcomeType::CouldNotStart) }
}

fn with_hint(what: &str, remedy: &str) -> String {
    if remedy.is_empty() {
        what.to_owned()
    } else {
        format!("{what}; {remedy}")
    }
}

fn empty(kind: OutcomeType) -> Outcome {
    Outcome { kind, code: None, signal: None, limit: None, used: None, detail: None }
}

/// The exit status of `tollgate run` for this outcome.
pub fn exit_status(outcome: &Outcome) -> u8 {
    match outcome.kind {
        // wait(2) gives eight bits; a code that does not fit is not one the kernel gave us.
        OutcomeType::Exited => outcome.code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX),
        OutcomeType::Signaled | OutcomeType::Killed => by_signal(outcome.signal.unwrap_or(libc::SIGKILL)),
        OutcomeType::WallExceeded => ExitCode::WallExceeded.number(),
        OutcomeType::CpuExceeded => ExitCode::CpuExceeded.number(),
        OutcomeType::MemoryExceeded => ExitCode::MemoryExceeded.number(),
        OutcomeType::PidsExceeded => ExitCode::PidsExceeded.number(),
        OutcomeType::WriteExceeded => ExitCode::WriteExceeded.number(),
        OutcomeType::OutputExceeded => ExitCode::OutputExceeded.number(),
        // 126 and 127 for a program that could not be executed, as a shell would give.
        OutcomeType::CouldNotStart => {
            outcome.code.and_then(|code| u8::try_from(code).ok()).unwrap_or(ExitCode::NotDone.number())
        }
        OutcomeType::CouldNotApply | OutcomeType::Interrupted => ExitCode::NotDone.number(),
    }
}

/// A shell's status for a program that a signal ended: 128 and the signal's number.
fn by_signal(signal: i32) -> u8 {
    u8::try_from(signal).ok().and_then(|signal| signal.checked_add(128)).unwrap_or(u8::MAX)
}

/// One line for a person: what happened, limit and use in human units, and the flag that changes it.
pub fn summary(outcome: &Outcome) -> String {
    let limit = outcome.limit.unwrap_or(0);
    let used = outcome.used.unwrap_or(0);
    let detail = outcome.detail.as_deref().unwrap_or("no reason was recorded");
    match outcome.kind {
        OutcomeType::Exited => format!("exited with status {}", outcome.code.unwrap_or(0)),
        OutcomeType::Signaled => format!("ended by {}", signal_name(outcome.signal)),
        OutcomeType::Killed => format!("killed with {}", signal_name(outcome.signal)),
        OutcomeType::WallExceeded => over("wall time", &time(limit), &time(used), "--wall"),
        OutcomeType::CpuExceeded => over("processor time", &time(limit), &time(used), "--cpu"),
        OutcomeType::MemoryExceeded => {
            over("memory", &bytes(limit), &format!("{} at the peak", bytes(used)), "--memory")
        }
        OutcomeType::PidsExceeded => {
            over("process", &format!("{limit} processes and threads"), &used.to_string(), "--pids")
        }
        OutcomeType::WriteExceeded if outcome.used.is_none() => {
            format!("ended, because the write limit of {} could not be held: {detail}", bytes(limit))
        }
        OutcomeType::WriteExceeded => over("write", &bytes(limit), &bytes(used), "--write-bytes"),
        OutcomeType::OutputExceeded => over("output", &bytes(limit), &bytes(used), "`--output-bytes`"),
        OutcomeType::CouldNotStart => format!("could not start: {detail}"),
        OutcomeType::CouldNotApply => format!("its changes could not be applied: {detail}"),
        OutcomeType::Interrupted => format!("interrupted: {detail}"),
    }
}

fn over(what: &str, limit: &str, used: &str, flag: &str) -> String {
    let flag = if flag.starts_with("--") { format!("`{flag}`") } else { flag.to_owned() };
    format!("{what} limit of {limit} exceeded, used {used}; raise it with {flag}")
}

fn signal_name(signal: Option<i32>) -> String {
    match signal {
        None => "a signal".to_owned(),
        Some(number) => match nix::sys::signal::Signal::try_from(number) {
            Ok(signal) => signal.as_str().to_owned(),
            Err(_) => format!("signal {number}"),
        },
    }
}

/// Bytes in the largest binary unit that leaves at least one whole, with one decimal unless it is exact.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    while unit + 1 < UNITS.len() && count >> (10 * (unit + 1)) > 0 {
        unit += 1;
    }
    let scale = 1_u64 << (10 * unit);
    if count.is_multiple_of(scale) {
        format!("{} {}", count / scale, UNITS[unit])
    } else {
        format!("{:.1} {}", count as f64 / scale as f64, UNITS[unit])
    }
}

/// Microseconds as milliseconds, seconds or minutes.
pub fn time(micros: u64) -> String {
    let short = |value: f64, unit: &str| {
        let text = format!("{value:.2}");
        format!("{} {unit}", text.trim_end_matches('0').trim_end_matches('.'))
    };
    match micros {
        0..=999_999 => short(micros as f64 / 1e3, "ms"),
        1_000_000..=119_999_999 => short(micros as f64 / 1e6, "s"),
        _ => short(micros as f64 / 6e7, "min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [OutcomeType; 12] = [
        OutcomeType::Exited,
        OutcomeType::Signaled,
        OutcomeType::WallExceeded,
        OutcomeType::CpuExceeded,
        OutcomeType::MemoryExceeded,
        OutcomeType::PidsExceeded,
        OutcomeType::WriteExceeded,
        OutcomeType::OutputExceeded,
        OutcomeType::Killed,
        OutcomeType::CouldNotStart,
        OutcomeType::CouldNotApply,
        OutcomeType::Interrupted,
    ];

    fn ended(ended: Ended) -> Facts {
        Facts::Ended {
            ended,
            exceeded: None,
            memory_kill: None,
            backstops: Backstops::default(),
            killed: None,
            not_applied: None,
        }
    }

    #[test]
    fn every_outcome_has_its_status_and_its_line() {
        let expected = |kind| match kind {
            OutcomeType::Exited => (3, "exited with status 3"),
            OutcomeType::Signaled => (143, "ended by SIGTERM"),
            OutcomeType::WallExceeded => (124, "wall time limit of 64 ms exceeded, used 1.5 s; raise it with `--wall`"),
            OutcomeType::CpuExceeded => {
                (152, "processor time limit of 64 ms exceeded, used 1.5 s; raise it with `--cpu`")
            }
            OutcomeType::MemoryExceeded => {
                (137, "memory limit of 62.5 KiB exceeded, used 1.4 MiB at the peak; raise it with `--memory`")
            }
            OutcomeType::PidsExceeded => {
                (155, "process limit of 64000 processes and threads exceeded, used 1500000; raise it with `--pids`")
            }
            OutcomeType::WriteExceeded => {
                (153, "write limit of 62.5 KiB exceeded, used 1.4 MiB; raise it with `--write-bytes`")
            }
            OutcomeType::OutputExceeded => {
                (154, "output limit of 62.5 KiB exceeded, used 1.4 MiB; raise it with `--output-bytes`")
            }
            OutcomeType::Killed => (143, "killed with SIGTERM"),
            OutcomeType::CouldNotStart => (125, "could not start: why"),
            OutcomeType::CouldNotApply => (125, "its changes could not be applied: why"),
            OutcomeType::Interrupted => (125, "interrupted: why"),
        };
        for kind in ALL {
            let outcome = Outcome {
                kind,
                code: (kind == OutcomeType::Exited).then_some(3),
                signal: Some(15),
                limit: Some(64_000),
                used: Some(1_500_000),
                detail: Some("why".to_owned()),
            };
            assert_eq!((exit_status(&outcome), summary(&outcome).as_str()), expected(kind), "{kind:?}");
        }
    }

    #[test]
    fn a_programs_own_status_passes_through() {
        for code in [0, 1, 2, 3, 77, 125, 126, 127, 130, 255] {
            assert_eq!(i32::from(exit_status(&decide(&ended(Ended::Exited(code))))), code);
        }
        for signal in [1, 2, 6, 9, 11, 15, 64] {
            let outcome = decide(&ended(Ended::Signaled(signal)));
            assert_eq!((outcome.kind, i32::from(exit_status(&outcome))), (OutcomeType::Signaled, 128 + signal));
        }
    }

    #[test]
    fn a_limit_is_the_outcome_whatever_the_program_made_of_the_signal() {
        let exceeded = Exceeded { kind: OutcomeType::CpuExceeded, used: 9, limit: 8 };
        for how in [Ended::Exited(0), Ended::Signaled(9), Ended::Unknown] {
            let mut facts = ended(how);
            if let Facts::Ended { exceeded: slot, killed, .. } = &mut facts {
                *slot = Some(exceeded);
                *killed = Some(15);
            }
            let outcome = decide(&facts);
            assert_eq!((outcome.kind, outcome.used, outcome.limit), (OutcomeType::CpuExceeded, Some(9), Some(8)));
        }
    }

    #[test]
    fn a_kill_for_memory_is_the_outcome_only_when_it_hit_the_program_itself() {
        let kill = Exceeded { kind: OutcomeType::MemoryExceeded, used: 64, limit: 64 };
        for (how, kind) in [
            (Ended::Signaled(9), OutcomeType::MemoryExceeded),
            (Ended::Unknown, OutcomeType::MemoryExceeded),
            (Ended::Exited(0), OutcomeType::Exited),
            (Ended::Exited(137), OutcomeType::Exited),
            (Ended::Signaled(15), OutcomeType::Signaled),
        ] {
            let mut facts = ended(how);
            if let Facts::Ended { memory_kill, .. } = &mut facts {
                *memory_kill = Some(kill);
            }
            assert_eq!(decide(&facts).kind, kind, "{how:?}");
        }
    }

    #[test]
    fn a_backstops_signal_is_its_limit_only_where_that_limit_was_set() {
        let with = |signal, backstops| {
            let mut facts = ended(Ended::Signaled(signal));
            if let Facts::Ended { backstops: slot, .. } = &mut facts {
                *slot = backstops;
            }
            decide(&facts).kind
        };
        let set = Backstops { cpu: Some((2, 1)), write: Some((2, 1)) };
        assert_eq!(with(libc::SIGXCPU, set), OutcomeType::CpuExceeded);
        assert_eq!(with(libc::SIGXFSZ, set), OutcomeType::WriteExceeded);
        assert_eq!(with(libc::SIGXCPU, Backstops::default()), OutcomeType::Signaled);
        assert_eq!(with(libc::SIGXFSZ, Backstops::default()), OutcomeType::Signaled);
    }

    #[test]
    fn a_program_that_cannot_be_executed_gives_the_shells_status() {
        for (errno, status) in [(libc::ENOENT, 127), (libc::ENOTDIR, 127), (libc::EACCES, 126), (libc::ENOEXEC, 126)] {
            let facts = Facts::NotStarted(NotStarted::Exec { errno, path: "./x".to_owned() });
            let outcome = decide(&facts);
            assert_eq!((outcome.kind, exit_status(&outcome)), (OutcomeType::CouldNotStart, status));
            assert!(summary(&outcome).contains("./x"));
        }
    }

    #[test]
    fn changes_that_could_not_be_applied_are_said() {
        let mut facts = ended(Ended::Exited(0));
        if let Facts::Ended { not_applied, .. } = &mut facts {
            *not_applied = Some("a file changed meanwhile".to_owned());
        }
        let outcome = decide(&facts);
        assert_eq!((outcome.kind, exit_status(&outcome)), (OutcomeType::CouldNotApply, 125));
        assert_eq!(decide(&Facts::Interrupted).kind, OutcomeType::Interrupted);
    }

    #[test]
    fn numbers_are_read_by_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(64 << 20), "64 MiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(time(200_000), "200 ms");
        assert_eq!(time(60_000_000), "60 s");
        assert_eq!(time(600_000_000), "10 min");
    }
}
