//! `tollgate export`: one run's receipts in a file that can be checked where there is no ledger.

use super::{output::Failure, standing};
use crate::ledger::export::ExportError;
use std::{
    io::Write,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Write one run as JSON Lines: its record, its receipts with their hashes, and the signed head that seals it.
///
/// `tollgate verify --export FILE --key KEY` checks such a file anywhere; docs/export.schema.json describes its lines.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Write to this file, which must not exist, instead of to stdout
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Writes the export.
///
/// # Errors
/// When there is no such run, and those of the ledger and of writing.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (ledger, record) = standing::find(state, &args.run)?;
    super::verify::warn(&ledger, Some(&record.id));
    let Some(path) = &args.output else {
        ledger.export(&record.id, out).map_err(failure)?;
        out.flush()?;
        return Ok(ExitCode::SUCCESS);
    };
    let cannot = |cause: std::io::Error| {
        Failure::new(format!("cannot write {}", path.display()), "name a new file in a folder that you can write")
            .because(&cause)
    };
    // Private, since a receipt tells what a program did and where.
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(cannot)?;
    let mut file = std::io::BufWriter::new(file);
    let written = match ledger.export(&record.id, &mut file) {
        Ok(()) => file.flush().map_err(cannot),
        Err(ExportError::Write(cause)) => Err(cannot(cause)),
        Err(error @ ExportError::Ledger(_)) => Err(failure(error)),
    };
    if written.is_err() {
        // Half an export says that it is one, but it is no use to anybody.
        let _ = std::fs::remove_file(path);
    }
    written.map(|()| ExitCode::SUCCESS)
}

fn failure(error: ExportError) -> Failure {
    match error {
        ExportError::Ledger(error) => error.into(),
        ExportError::Write(error) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::tests::ledger_with_two_runs;

    #[test]
    fn an_export_goes_to_a_new_private_file_and_never_over_another() {
        let (root, ledger) = ledger_with_two_runs();
        let path = root.path().join("export.jsonl");
        let args = Args { run: "bbb".to_owned(), output: Some(path.clone()) };
        run(&args, ledger.state(), &mut Vec::new()).expect("writes");
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("there").permissions());
        assert_eq!(mode & 0o777, 0o600);
        let mut out = Vec::new();
        run(&Args { output: None, ..args.clone() }, ledger.state(), &mut out).expect("writes");
        assert_eq!(std::fs::read(&path).expect("reads"), out);
        let failure = run(&args, ledger.state(), &mut Vec::new()).expect_err("refused");
        assert!(failure.message.contains("export.jsonl"), "{failure}");
        assert_eq!(std::fs::read(&path).expect("reads"), out);
    }
}
