//! `tollgate logs`: what a run printed.

use super::{output::Failure, standing};
use crate::{
    doors::{base64, control::Stream},
    ledger::record::RunState,
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// How often a followed log is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Print what a run printed: its stdout to stdout, its stderr to stderr.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Go on until the run ends
    #[arg(long, short)]
    pub follow: bool,
    /// Only its stdout
    #[arg(long, conflicts_with = "stderr")]
    pub stdout: bool,
    /// Only its stderr, to stdout
    #[arg(long)]
    pub stderr: bool,
    /// Print what was printed as JSON objects, each with its stream and its text; bytes that are no UTF-8 come as
    /// base64 instead
    #[arg(long)]
    pub json: bool,
}

/// Copies a run's logs to `out`, its stderr to `err` unless that alone is asked for.
///
/// The bytes are the program's own, unchanged.
///
/// # Errors
/// When there is no such run or it has no log, and those of reading and writing.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, err: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (ledger, record) = standing::find(state, &args.run)?;
    let run_dir = ledger.run_dir(&record.id);
    let wanted = match (args.stdout, args.stderr) {
        (false, false) => vec![Stream::Terminal, Stream::Stdout, Stream::Stderr],
        (_, true) => vec![Stream::Stderr],
        (true, false) => vec![Stream::Stdout],
    };
    let mut logs: Vec<Log> = wanted.into_iter().map(|stream| Log::new(&run_dir, stream)).collect();
    let mut ended = record.state == RunState::Ended;
    loop {
        for log in &mut logs {
            match log.stream {
                stream if args.json => log.copy(&mut Objects { stream, out: &mut *out })?,
                Stream::Stderr if !args.stderr => log.copy(err)?,
                Stream::Stdout | Stream::Stderr | Stream::Terminal => log.copy(out)?,
            }
        }
        if !args.follow || ended {
            break;
        }
        std::thread::sleep(LOOK);
        // Looked up before the last copy, so that what it printed last is not missed.
        let now = ledger.run(&record.id.0)?;
        ended = standing::settle(&ledger, now)?.state == RunState::Ended;
    }
    if logs.iter().all(|log| log.file.is_none()) {
        let hint = "a run that could not start prints nothing; `tollgate inspect` says how it ended";
        return Err(Failure::new(format!("run {} has no log of what is asked for", record.id), hint));
    }
    Ok(ExitCode::SUCCESS)
}

/// Turns each piece of a log into a line of JSON.
struct Objects<'a> {
    stream: Stream,
    out: &'a mut dyn Write,
}

impl Write for Objects<'_> {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        // A letter that the end of the piece cuts in two is left for the next.
        let length = match std::str::from_utf8(piece) {
            Err(cut) if cut.error_len().is_none() && cut.valid_up_to() > 0 => cut.valid_up_to(),
            Ok(_) | Err(_) => piece.len(),
        };
        let stream = self.stream.file().trim_end_matches(".log");
        let object = match std::str::from_utf8(&piece[..length]) {
            Ok(text) => serde_json::json!({ "stream": stream, "text": text }),
            Err(_not_text) => serde_json::json!({ "stream": stream, "base64": base64::encode(piece) }),
        };
        writeln!(self.out, "{object}")?;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// One log and how far it is copied.
struct Log {
    stream: Stream,
    path: PathBuf,
    file: Option<File>,
}

impl Log {
    fn new(run_dir: &Path, stream: Stream) -> Log {
        Log { stream, path: run_dir.join(stream.file()), file: None }
    }

    /// Copies what was added since the last time.
    fn copy(&mut self, to: &mut dyn Write) -> Result<(), Failure> {
        if self.file.is_none() {
            self.file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&self.path) {
                Ok(file) => Some(file),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(cause) => return Err(self.unreadable(&cause)),
            };
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut piece = vec![0; 64 * 1024];
        loop {
            match file.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => to.write_all(&piece[..length])?,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(self.unreadable(&cause)),
            }
        }
        to.flush()?;
        Ok(())
    }

    fn unreadable(&self, cause: &io::Error) -> Failure {
        let hint = "logs are readable by the user who started the run, and by root";
        Failure::new(format!("cannot read {}", self.path.display()), hint).because(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli::ps::tests::ledger_with_two_runs, ledger::Ledger};

    fn with_logs() -> (tempfile::TempDir, Ledger) {
        let (root, ledger) = ledger_with_two_runs();
        let run_dir = ledger.state().join("runs/aaaaaaaaaaa1");
        std::fs::create_dir_all(&run_dir).expect("makes");
        std::fs::write(run_dir.join("stdout.log"), b"out\xff").expect("writes");
        std::fs::write(run_dir.join("stderr.log"), b"err").expect("writes");
        (root, ledger)
    }

    fn printed(args: &Args, ledger: &Ledger) -> (Vec<u8>, Vec<u8>) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        run(args, ledger.state(), &mut out, &mut err).expect("prints");
        (out, err)
    }

    #[test]
    fn each_stream_goes_where_it_came_from_unchanged() {
        let (_root, ledger) = with_logs();
        let both = Args { run: "aaa".to_owned(), follow: false, stdout: false, stderr: false, json: false };
        assert_eq!(printed(&both, &ledger), (b"out\xff".to_vec(), b"err".to_vec()));
        assert_eq!(printed(&Args { stdout: true, ..both.clone() }, &ledger), (b"out\xff".to_vec(), Vec::new()));
        assert_eq!(printed(&Args { stderr: true, ..both }, &ledger), (b"err".to_vec(), Vec::new()));
    }

    #[test]
    fn json_says_the_stream_and_keeps_every_byte() {
        let (_root, ledger) = with_logs();
        let both = Args { run: "aaa".to_owned(), follow: false, stdout: false, stderr: false, json: true };
        let (out, err) = printed(&both, &ledger);
        let lines: Vec<serde_json::Value> =
            out.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
        let expected = [
            serde_json::json!({ "stream": "stdout", "base64": base64::encode(b"out\xff") }),
            serde_json::json!({ "stream": "stderr", "text": "err" }),
        ];
        assert_eq!((lines.as_slice(), err), (expected.as_slice(), Vec::new()));
    }

    #[test]
    fn following_a_run_without_a_supervisor_ends() {
        let (_root, ledger) = with_logs();
        let follow = Args { run: "aaa".to_owned(), follow: true, stdout: true, stderr: false, json: false };
        assert_eq!(printed(&follow, &ledger).0, b"out\xff");
    }

    #[test]
    fn a_run_without_logs_says_so() {
        let (_root, ledger) = ledger_with_two_runs();
        let args = Args { run: "bbb".to_owned(), follow: false, stdout: false, stderr: false, json: false };
        let failure = run(&args, ledger.state(), &mut Vec::new(), &mut Vec::new()).expect_err("has none");
        assert!(failure.message.contains("bbbbbbbbbbb1"), "{failure}");
    }

    #[test]
    fn a_link_in_a_logs_place_is_not_followed() {
        let (root, ledger) = ledger_with_two_runs();
        let run_dir = ledger.state().join("runs/bbbbbbbbbbb1");
        std::fs::create_dir_all(&run_dir).expect("makes");
        std::fs::write(root.path().join("other"), "other").expect("writes");
        std::os::unix::fs::symlink(root.path().join("other"), run_dir.join("stdout.log")).expect("links");
        let args = Args { run: "bbb".to_owned(), follow: false, stdout: true, stderr: false, json: false };
        assert!(run(&args, ledger.state(), &mut Vec::new(), &mut Vec::new()).is_err());
    }
}
