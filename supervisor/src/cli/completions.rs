//! `tollgate completions SHELL`: a shell's completion script, made from the same definitions as the help.

use super::{output::Failure, Cli};
use clap::CommandFactory;
use std::{io::Write, process::ExitCode};

/// Print the completion script of a shell
///
/// For bash: `tollgate completions bash > ~/.local/share/bash-completion/completions/tollgate`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Prints the script.
///
/// # Errors
/// Those of writing to `out`.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    // Into memory first: the generator panics where it cannot write, and a reader may hang up.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tollgate", &mut script);
    out.write_all(&script)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_gets_a_script_that_knows_every_subcommand() {
        for shell in clap_complete::Shell::value_variants() {
            let mut script = Vec::new();
            run(&Args { shell: *shell }, &mut script).expect("writes into memory");
            let script = String::from_utf8(script).expect("scripts are text");
            for command in Cli::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: no {}", command.get_name());
            }
        }
    }

    #[test]
    fn a_reader_that_hangs_up_is_no_error() {
        struct HungUp;
        impl Write for HungUp {
            fn write(&mut self, _bytes: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let failure = run(&Args { shell: clap_complete::Shell::Bash }, &mut HungUp).expect_err("cannot write");
        assert_eq!(failure.status, 0);
    }
}
