//! What is wrong with a policy, and where.

use std::{fmt, path::PathBuf, sync::Arc};

/// Why there is no policy. None of these ever leads to a wider one.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// No policy has this name.
    #[error("no policy is called `{name}`{}", suggest(.suggestion.as_deref()))]
    Unknown {
        /// The name as it was asked for.
        name: String,
        /// The closest name that exists.
        suggestion: Option<String>,
        /// Where was looked, in order.
        searched: Vec<String>,
    },
    /// The text can be neither a name nor a path.
    #[error(
        "`{0}` is no policy: a name has lower-case letters, digits and hyphens, a path has a slash or ends in .toml"
    )]
    NotAReference(String),
    /// open(2) or read(2) failed.
    #[error("cannot read the policy {}: {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The file is larger than any policy.
    #[error("the policy {} has more than {limit} bytes", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most that is read.
        limit: u64,
    },
    /// Something written in a file is wrong; every fault that was found.
    #[error("{}", Joined(.0))]
    Faults(Vec<Fault>),
    /// Something on the command line is wrong.
    #[error("{option}: {message}")]
    Option {
        /// The option, with its dashes.
        option: &'static str,
        /// What is wrong with its value.
        message: String,
    },
}

impl PolicyError {
    /// What to do about it, for the command line to print after the causes; empty where the message says it.
    pub fn hint(&self) -> String {
        match self {
            PolicyError::Unknown { searched, .. } => {
                format!("looked in: {}; `tollgate policy list` shows every policy", searched.join(", "))
            }
            PolicyError::Unreadable { path, .. } => {
                format!("make {} readable to you, or name another policy with --policy", path.display())
            }
            PolicyError::Faults(_) => {
                "`tollgate policy check FILE` shows every fault; docs/policy.md has every key".to_owned()
            }
            PolicyError::NotAReference(_) | PolicyError::TooLarge { .. } | PolicyError::Option { .. } => String::new(),
        }
    }
}

/// One thing that is wrong in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file, as the user would name it.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// The line's text.
    pub excerpt: String,
    /// What is wrong, with the offending text.
    pub message: String,
    /// What is allowed, or what to do.
    pub help: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { file, line, column, excerpt, message, help } = self;
        write!(f, "{file}:{line}:{column}: {message}")?;
        if !excerpt.trim().is_empty() {
            write!(f, "\n  {line} | {excerpt}")?;
        }
        if !help.is_empty() {
            write!(f, "\n  help: {help}")?;
        }
        Ok(())
    }
}

struct Joined<'a>(&'a [Fault]);

impl fmt::Display for Joined<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, fault) in self.0.iter().enumerate() {
            if place > 0 {
                writeln!(f)?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

fn count_newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

/// A file's name and text, for turning byte offsets into places.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file, as the user would name it.
    pub name: String,
    /// Its whole text.
    pub text: Arc<str>,
}

impl Source {
    /// The line of a byte offset, from 1.
    pub fn line(&self, offset: usize) -> usize {
        count_newlines(self.before(offset).as_bytes()) + 1
    }

    /// The line of each of these byte offsets, from 1. Where they ascend, no part of the text is read twice.
    pub fn lines<'a>(&'a self, offsets: impl IntoIterator<Item = usize> + 'a) -> impl Iterator<Item = usize> + 'a {
        let (mut read, mut newlines) = (0, 0);
        offsets.into_iter().map(move |offset| {
            let before = self.before(offset);
            if before.len() < read {
                (read, newlines) = (0, 0);
            }
            newlines += count_newlines(&before.as_bytes()[read..]);
            read = before.len();
            newlines + 1
        })
    }

    /// A fault at a byte offset.
    pub fn fault(&self, offset: usize, message: impl Into<String>, help: impl Into<String>) -> Fault {
        let before = self.before(offset);
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let excerpt = self.text[start..].lines().next().unwrap_or_default();
        Fault {
            file: self.name.clone(),
            line: self.line(offset),
            column: before[start..].chars().count() + 1,
            // A terminal must not obey what a file from somebody else holds.
            excerpt: excerpt.chars().take(EXCERPT).filter(|letter| !letter.is_control()).collect(),
            message: message.into(),
            help: help.into(),
        }
    }

    fn before(&self, offset: usize) -> &str {
        let mut end = offset.min(self.text.len());
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        &self.text[..end]
    }
}

/// Characters of a line that a fault shows: as many as fit a terminal beside the line's number.
const EXCERPT: usize = 120;

/// The candidate that was probably meant, if one is close.
pub fn closest<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A bound, so that a hostile key cannot make the comparison slow.
    let text: String = text.chars().take(64).collect();
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&text, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}

/// `; did you mean …`, or nothing.
pub fn suggest(suggestion: Option<&str>) -> String {
    suggestion.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_found_together_are_those_found_one_by_one_in_any_order() {
        let source = Source { name: "policy".to_owned(), text: "a\nb\u{e9}\n\n  c\n".into() };
        let ascending: Vec<usize> = (0..source.text.len() + 3).collect();
        let descending: Vec<usize> = ascending.iter().rev().copied().collect();
        for offsets in [ascending, descending, vec![7, 7, 0, 9, 3]] {
            let alone: Vec<usize> = offsets.iter().map(|offset| source.line(*offset)).collect();
            assert_eq!(source.lines(offsets).collect::<Vec<_>>(), alone);
        }
    }
}
