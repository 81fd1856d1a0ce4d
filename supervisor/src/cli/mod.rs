//! The command line: one file a subcommand.

pub mod inspect;
pub mod kill;
pub mod logs;
pub mod output;
pub mod policy;
pub mod ps;
pub mod receipts;
pub mod standing;

/// Runs the command line and gives its exit status.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
