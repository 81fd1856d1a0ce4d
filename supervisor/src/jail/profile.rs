//! Profiles: what a jail's view is made of, in bubblewrap's own argument language.
//!
//! A profile is text: one option and its arguments after another, `#` starts a comment at the beginning of a line,
//! words are split at white space. Only the options listed in [`parse`] are understood; any other is an error with
//! its line, because an option that is silently ignored is a hole.

use super::spec::{Bind, Presence, ViewStep};
use std::{ffi::OsString, path::PathBuf};
use tollgate_shim::protocol::Access;

/// The profile of an ordinary run.
pub const DEFAULT: &str = include_str!("../../../bwrap-profiles/default.bwrap");

/// What the variables of a profile stand for.
#[derive(Clone, Debug)]
pub struct Variables {
    /// `${workspace}`: the run's folder.
    pub workspace: PathBuf,
    /// `${home}`: the private home.
    pub home: PathBuf,
    /// `${size:tmp}`: bytes for each private /tmp.
    pub tmp_bytes: u64,
    /// `${size:home}`: bytes for the private home.
    pub home_bytes: u64,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ProfileError {
    /// No profile has this name.
    #[error("there is no profile `{name}`; the built-in one is `default`, another is a path")]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// The file cannot be read.
    #[error("profile {path}: {reason}")]
    Unreadable {
        /// Its path.
        path: String,
        /// The system's reason.
        reason: String,
    },
    /// A line means nothing to us.
    #[error("profile line {line}: {problem}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it and what would be right.
        problem: String,
    },
    /// A jail without its namespaces is none.
    #[error("the profile does not say `--unshare-all`; a jail has all its namespaces")]
    SharesNamespaces,
}

/// The text of a profile: built in by name, or a file by path.
pub fn text(name: &str) -> Result<String, ProfileError> {
    match name {
        "default" => Ok(DEFAULT.to_owned()),
        path if path.contains('/') => std::fs::read_to_string(path)
            .map_err(|error| ProfileError::Unreadable { path: path.to_owned(), reason: error.to_string() }),
        name => Err(ProfileError::Unknown { name: name.to_owned() }),
    }
}

/// Reads a profile into steps, in its order.
pub fn parse(text: &str, variables: &Variables) -> Result<Vec<ViewStep>, ProfileError> {
    let mut steps = Vec::new();
    let mut unshares_all = false;
    // `--perms` and `--size` belong to the option after them (bwrap(1)).
    let (mut perms, mut size) = (None, None);
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let wrong = |problem: String| ProfileError::Line { line: line_number, problem };
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        while let Some(option) = words.next() {
            let mut argument = |what: &str| -> Result<OsString, ProfileError> {
                let word = words.next().ok_or_else(|| wrong(format!("`{option}` wants {what}")))?;
                substitute(word, variables).map_err(&wrong)
            };
            let path = |text: OsString| -> Result<PathBuf, ProfileError> {
                let path = PathBuf::from(text);
                match path.is_absolute() {
                    true => Ok(path),
                    false => Err(wrong(format!("`{}` must be an absolute path", path.display()))),
                }
            };
            match option {
                "--unshare-all" => unshares_all = true,
                "--perms" => {
                    let word = argument("an octal mode")?.to_string_lossy().into_owned();
                    let mode = u32::from_str_radix(&word, 8).ok().filter(|mode| *mode <= 0o7777);
                    perms = Some(mode.ok_or_else(|| wrong(format!("`{word}` is not an octal mode")))?);
                    continue;
                }
                "--size" => {
                    let word = argument("a number of bytes")?.to_string_lossy().into_owned();
                    let bytes = word.parse().ok().filter(|bytes| *bytes > 0);
                    size = Some(bytes.ok_or_else(|| wrong(format!("`{word}` is not a number of bytes above 0")))?);
                    continue;
                }
                "--ro-bind" | "--ro-bind-try" | "--bind" | "--bind-try" => {
                    let access = if option.starts_with("--ro") { Access::ReadOnly } else { Access::ReadWrite };
                    let presence = if option.ends_with("-try") { Presence::Optional } else { Presence::Required };
                    let source = path(argument("a source and a target")?)?;
                    let target = path(argument("a source and a target")?)?;
                    steps.push(ViewStep::Bind(Bind { source, target, access, presence }));
                }
                "--symlink" => {
                    let to = PathBuf::from(argument("what it points to and a path")?);
                    steps.push(ViewStep::Symlink { to, target: path(argument("what it points to and a path")?)? });
                }
                "--proc" => steps.push(ViewStep::Proc { target: path(argument("a path")?)? }),
                "--dev" => steps.push(ViewStep::Dev { target: path(argument("a path")?)? }),
                "--tmpfs" => {
                    let target = path(argument("a path")?)?;
                    let bytes = size.ok_or_else(|| wrong("`--tmpfs` wants a `--size` before it".to_owned()))?;
                    steps.push(ViewStep::Tmpfs { target, bytes, mode: perms.unwrap_or(0o755) });
                }
                "--dir" => {
                    let target = path(argument("a path")?)?;
                    steps.push(ViewStep::Dir { target, mode: perms.unwrap_or(0o755) });
                }
                unknown => {
                    return Err(wrong(format!(
                        "`{unknown}` is not an option of a profile; known are --unshare-all, --ro-bind, --ro-bind-try, \
                         --bind, --bind-try, --symlink, --proc, --dev, --size, --perms, --tmpfs and --dir"
                    )))
                }
            }
            (perms, size) = (None, None);
        }
    }
    match unshares_all {
        true => Ok(steps),
        false => Err(ProfileError::SharesNamespaces),
    }
}

fn substitute(word: &str, variables: &Variables) -> Result<OsString, String> {
    let Some(name) = word.strip_prefix("${").and_then(|rest| rest.strip_suffix('}')) else {
        return match word.contains("${") {
            true => Err(format!("`{word}`: a variable must be a word of its own")),
            false => Ok(word.into()),
        };
    };
    match name {
        "workspace" => Ok(variables.workspace.clone().into()),
        "home" => Ok(variables.home.clone().into()),
        "size:tmp" => Ok(variables.tmp_bytes.to_string().into()),
        "size:home" => Ok(variables.home_bytes.to_string().into()),
        unknown => Err(format!("there is no variable `{unknown}`; known are workspace, home, size:tmp and size:home")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Variables {
        Variables { workspace: "/w".into(), home: "/home/agent".into(), tmp_bytes: 7, home_bytes: 8 }
    }

    #[test]
    fn the_default_profile_ends_with_the_workspace() {
        let steps = parse(DEFAULT, &variables()).unwrap();
        assert!(matches!(steps.last(), Some(ViewStep::Bind(bind)) if bind.target == *"/w"));
    }

    #[test]
    fn sizes_and_modes_belong_to_the_next_option_only() {
        let steps = parse("--unshare-all\n--size 9 --perms 0700 --tmpfs /a\n--dir /b", &variables()).unwrap();
        assert_eq!(steps[0], ViewStep::Tmpfs { target: "/a".into(), bytes: 9, mode: 0o700 });
        assert_eq!(steps[1], ViewStep::Dir { target: "/b".into(), mode: 0o755 });
    }

    #[test]
    fn what_is_not_understood_is_an_error_with_its_line() {
        let table = [
            ("--unshare-all\n--share-net", 2, "--share-net"),
            ("--unshare-all --ro-bind /usr", 1, "target"),
            ("--tmpfs /x", 1, "--size"),
            ("--unshare-all --ro-bind usr /usr", 1, "absolute"),
            ("\n\n--size 0", 3, "above 0"),
            ("--ro-bind ${secret} /x", 1, "secret"),
            ("--ro-bind /a${home} /x", 1, "word of its own"),
        ];
        for (text, line, says) in table {
            match parse(text, &variables()) {
                Err(ProfileError::Line { line: at, problem }) => {
                    assert_eq!(at, line, "{text}");
                    assert!(problem.contains(says), "{text}: {problem}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_profile_that_shares_namespaces_is_refused() {
        assert_eq!(parse("--ro-bind /usr /usr", &variables()), Err(ProfileError::SharesNamespaces));
    }
}
