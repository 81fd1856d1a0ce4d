//! `tollgate man [DIR]`: the manual pages, made from the same definitions as the help.

use super::{output::Failure, Cli};
use clap::CommandFactory;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Print the manual page, or write all of them into a folder
///
/// `tollgate man | man -l -` reads it; `tollgate man ~/.local/share/man/man1` installs one page a subcommand.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The folder to write `tollgate.1`, `tollgate-run.1` and so on into; made if missing
    #[arg(value_name = "DIR")]
    pub folder: Option<PathBuf>,
}

/// Prints or writes the pages.
///
/// # Errors
/// Those of writing.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.folder {
        None => {
            clap_mangen::Man::new(Cli::command()).render(&mut &mut *out)?;
            out.flush()?;
        }
        Some(folder) => write_into(folder).map_err(|cause| {
            Failure::new(format!("cannot write the manual pages into {}", folder.display()), "name a folder of yours")
                .because(&cause)
        })?,
    }
    Ok(ExitCode::SUCCESS)
}

fn write_into(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(Cli::command(), folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_page_a_subcommand_and_the_main_one_names_them() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let pages = folder.path().join("man1");
        run(&Args { folder: Some(pages.clone()) }, &mut Vec::new()).expect("writes");
        let main = std::fs::read_to_string(pages.join("tollgate.1")).expect("the main page");
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            assert!(pages.join(format!("tollgate-{name}.1")).is_file(), "no page for {name}");
            assert!(main.contains(&format!("tollgate\\-{name}(1)")), "the main page does not name {name}: {main}");
        }
    }

    #[test]
    fn without_a_folder_the_main_page_goes_to_the_output() {
        let mut page = Vec::new();
        run(&Args { folder: None }, &mut page).expect("writes into memory");
        assert!(String::from_utf8(page).expect("text").contains(".TH tollgate 1"));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let below = file.path().join("man1");
        let failure = run(&Args { folder: Some(below.clone()) }, &mut Vec::new()).expect_err("a file is no folder");
        assert!(failure.message.contains(&below.display().to_string()), "{failure}");
    }
}
