//! The page of all commands, `docs/commands.md`, made from the same definitions as the help.

use super::Cli;
use clap::{Arg, Command, CommandFactory};
use std::fmt::Write;

/// The whole page, in Markdown.
pub fn page() -> String {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut page = String::from(
        "# Commands\n\n\
         This page is made from the definitions of the command line in `supervisor/src/cli`; a test holds them \
         together. `tollgate COMMAND --help` says the same, `tollgate man` makes manual pages of it, and \
         `tollgate completions SHELL` a completion script.\n\n\
         Data goes to standard output, talk to standard error. Lists with `--json` print one object a line.\n",
    );
    describe(&mut page, &command, 2);
    page
}

fn describe(page: &mut String, command: &Command, depth: usize) {
    let commands =
        || command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help");
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    line(page, format_args!("\n{} {name}\n\n{}\n", "#".repeat(depth), sentences(&about)));
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replace("\n       ", "\n");
    line(page, format_args!("```\n{}\n```", usage.trim_end()));
    let arguments: Vec<_> = command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set() && !matches!(argument.get_id().as_str(), "help" | "version"))
        // A setting of all commands is described once, where it is defined.
        .filter(|argument| depth == 2 || !argument.is_global_set())
        .collect();
    if !arguments.is_empty() {
        line(page, format_args!("\n| argument | |\n|---|---|"));
    }
    for argument in arguments {
        line(page, format_args!("| `{}` | {} |", cell(&spelling(argument)), cell(&explanation(argument))));
    }
    for command in commands() {
        describe(page, command, depth + 1);
    }
}

/// As it is written on the command line: `-q, --quiet`, `--wall <TIME>`, `[POLICY]`.
fn spelling(argument: &Arg) -> String {
    let value = match argument.get_value_names() {
        Some(names) if argument.get_action().takes_values() => {
            names.iter().map(|name| format!("<{name}>")).collect::<Vec<_>>().join(" ")
        }
        _ => String::new(),
    };
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let flags = short.into_iter().chain(long).collect::<Vec<_>>().join(", ");
    match (flags.as_str(), argument.is_required_set()) {
        ("", true) => value,
        ("", false) => value.replace('<', "[").replace('>', "]"),
        (flags, _) if value.is_empty() => flags.to_owned(),
        (flags, _) => format!("{flags} {value}"),
    }
}

fn explanation(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut text = full_stop(&help);
    let values: Vec<_> = argument
        .get_possible_values()
        .iter()
        .filter(|value| argument.get_action().takes_values() && !value.is_hide_set())
        .map(|value| match value.get_help() {
            Some(help) => format!("`{}` ({})", value.get_name(), lower_first(&help.to_string())),
            None => format!("`{}`", value.get_name()),
        })
        .collect();
    if !values.is_empty() {
        write!(text, " One of {}.", values.join(", ")).expect("writing into a string does not fail");
    }
    let defaults: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !defaults.is_empty() && argument.get_action().takes_values() {
        write!(text, " By default `{}`.", defaults.join(" ")).expect("writing into a string does not fail");
    }
    text
}

fn lower_first(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

/// Help texts end without a full stop, sentences of a page with one.
fn full_stop(text: &str) -> String {
    let text = text.trim_end();
    match text.is_empty() || text.ends_with(['.', ':', '?', '!']) {
        true => text.to_owned(),
        false => format!("{text}."),
    }
}

/// The same for each paragraph.
fn sentences(text: &str) -> String {
    text.split("\n\n").map(full_stop).collect::<Vec<_>>().join("\n\n")
}

/// Text that stays within one cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn line(page: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(page, "{text}").expect("writing into a string does not fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_docs_is_the_one_made_from_the_definitions() {
        let made = page();
        let stored = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/commands.md");
        if std::env::var_os("TOLLGATE_WRITE_DOCS").is_some() {
            std::fs::write(&stored, &made).expect("docs/ can be written");
        }
        let stored = std::fs::read_to_string(stored).expect("docs/commands.md");
        assert_eq!(stored, made, "run this test with TOLLGATE_WRITE_DOCS=1 to write docs/commands.md");
    }

    #[test]
    fn every_command_and_every_option_explains_itself() {
        fn check(command: &Command) {
            assert!(command.get_about().is_some(), "`{}` says nothing", command.get_name());
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                assert!(
                    argument.get_help().is_some(),
                    "`{}` of `{}` says nothing",
                    argument.get_id(),
                    command.get_name()
                );
            }
            command.get_subcommands().for_each(check);
        }
        let mut command = Cli::command();
        command.build();
        check(&command);
    }
}
