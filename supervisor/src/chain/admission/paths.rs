//! Which workspace paths a rule is about.

use super::Reach;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::{
    cmp::Ordering,
    fmt,
    sync::{Arc, OnceLock},
};

/// Globs of workspace paths, checked when made and compiled when first asked.
///
/// `*` and `?` do not match a slash, `**` matches any number of components, letters match their own case only. They
/// are compiled late because a run that changes nothing never asks, and its start should not pay for it.
#[derive(Clone)]
pub struct Patterns {
    texts: Vec<String>,
    /// The line of each, or nothing where they are from no file.
    lines: Vec<usize>,
    compiled: Arc<OnceLock<Compiled>>,
}

struct Compiled {
    /// None where the globs could not be compiled together; see [`Patterns::admit`] for what that means.
    itself: Option<GlobSet>,
    /// Matches directories that hold what a pattern protects, `.git` for `.git/hooks/**`; with the place of the
    /// pattern that each is for.
    above: Option<(GlobSet, Vec<usize>)>,
}

/// Why a text is no pattern of workspace paths.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Nothing between the quotes.
    #[error("an empty pattern matches nothing; write `**` for every path")]
    Empty,
    /// Starts with a slash or `~`.
    #[error("a pattern is relative to the workspace; it cannot start with `/` or `~`")]
    NotRelative,
    /// Has a component that no resource has.
    #[error("a pattern has no `.`, `..` or empty components; paths are compared in their shortest form")]
    NotNormal,
    /// A slash inside braces or brackets.
    #[error("a pattern has no `/` within braces or brackets; write two patterns")]
    SlashInGroup,
    /// The glob library's own complaint.
    #[error("not a glob: {0}")]
    Syntax(String),
}

impl Patterns {
    /// Patterns that are from no file.
    ///
    /// # Errors
    ///
    /// As [`Patterns::at_lines`].
    pub fn new(texts: Vec<String>) -> Result<Patterns, Vec<(usize, String, PatternError)>> {
        Patterns::at_lines(texts, Vec::new())
    }

    /// Patterns and the line on which each is written, so that a refusal can show the very one that matched.
    ///
    /// # Errors
    ///
    /// Every text that is no pattern, with its place in the list.
    pub fn at_lines(texts: Vec<String>, lines: Vec<usize>) -> Result<Patterns, Vec<(usize, String, PatternError)>> {
        let errors: Vec<_> = texts
            .iter()
            .enumerate()
            .filter_map(|(place, text)| Some((place, text.clone(), check_pattern(text).err()?)))
            .collect();
        match errors.is_empty() {
            true => Ok(Patterns { texts, lines, compiled: Arc::default() }),
            false => Err(errors),
        }
    }

    /// The patterns as they were written.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// The line on which the pattern at this place is written.
    pub(super) fn line(&self, place: usize) -> Option<usize> {
        self.lines.get(place).copied()
    }

    /// Whether one of the patterns matches this path. Globs that do not compile match nothing.
    pub fn admits(&self, path: &str) -> bool {
        self.admit(path).is_some()
    }

    /// Whether a rule that allows matches this path, and the place of the pattern that does. Globs that do not
    /// compile allow nothing.
    pub(super) fn admit(&self, path: &str) -> Option<usize> {
        self.compiled().itself.as_ref()?.matches(path).first().copied()
    }

    /// Whether a rule that restricts matches this path, or, for an effect that reaches below it, anything that might
    /// lie there; and the place of the pattern that does. Globs that do not compile restrict everything.
    pub(super) fn restrict(&self, path: &str, reach: Reach) -> Option<usize> {
        let compiled = self.compiled();
        let (Some(itself), Some((above, places))) = (&compiled.itself, &compiled.above) else { return Some(0) };
        let below = || match reach {
            Reach::Itself => None,
            // The workspace's root is above everything.
            Reach::Below if path.is_empty() => Some(0),
            Reach::Below => above.matches(path).first().and_then(|place| places.get(*place).copied()),
        };
        itself.matches(path).first().copied().or_else(below)
    }

    fn compiled(&self) -> &Compiled {
        self.compiled.get_or_init(|| {
            let above = self.texts.iter().enumerate();
            let above = above.flat_map(|(place, text)| directories_above(text).map(move |prefix| (place, prefix)));
            let (places, prefixes): (Vec<usize>, Vec<&str>) = above.unzip();
            Compiled {
                itself: glob_set(self.texts.iter().map(String::as_str)),
                above: glob_set(prefixes.into_iter()).map(|set| (set, places)),
            }
        })
    }
}

impl PartialEq for Patterns {
    fn eq(&self, other: &Patterns) -> bool {
        (&self.texts, &self.lines) == (&other.texts, &other.lines)
    }
}

impl Eq for Patterns {}

impl PartialOrd for Patterns {
    fn partial_cmp(&self, other: &Patterns) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Patterns {
    fn cmp(&self, other: &Patterns) -> Ordering {
        (&self.texts, &self.lines).cmp(&(&other.texts, &other.lines))
    }
}

impl fmt::Debug for Patterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.texts).finish()
    }
}

fn check_pattern(text: &str) -> Result<(), PatternError> {
    if text.is_empty() {
        return Err(PatternError::Empty);
    }
    if text.starts_with(['/', '~']) {
        return Err(PatternError::NotRelative);
    }
    if text.split('/').any(|component| matches!(component, "" | "." | "..")) {
        return Err(PatternError::NotNormal);
    }
    if is_plain(text) {
        return Ok(());
    }
    glob(text).map_err(|error| PatternError::Syntax(error.kind().to_string()))?;
    // Each component must be a glob by itself, or what lies above a pattern could not be told.
    if text.split('/').any(|component| glob(component).is_err()) {
        return Err(PatternError::SlashInGroup);
    }
    Ok(())
}

/// Whether a pattern has nothing that has to be closed or completed, so that it compiles whatever it says. Most are
/// so, and compiling each only to see that it can be takes longer than all else that reads a policy.
fn is_plain(text: &str) -> bool {
    !text.contains(['[', ']', '{', '}', '\\'])
}

fn glob(text: &str) -> Result<globset::Glob, globset::Error> {
    GlobBuilder::new(text).literal_separator(true).backslash_escape(true).build()
}

fn glob_set<'a>(texts: impl Iterator<Item = &'a str>) -> Option<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for text in texts {
        set.add(glob(text).ok()?);
    }
    set.build().ok()
}

/// The prefixes of a pattern that name a directory: `**/.git` and `**/.git/hooks` for `**/.git/hooks/**`.
///
/// A prefix that ends in a component without a letter of its own (`**`, `*`) is left out. It would match every
/// directory, and a rule for `**/.env` would then restrict the removal of any of them.
fn directories_above(pattern: &str) -> impl Iterator<Item = &str> {
    pattern.match_indices('/').map(|(end, _)| &pattern[..end]).filter(|prefix| {
        let last = prefix.rsplit('/').next().unwrap_or(prefix);
        !last.chars().all(|letter| matches!(letter, '*' | '?'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_accepted_without_compiling_compiles(text in "[a-c*?./ !^,~-]{1,12}") {
            let components_compile = text.split('/').all(|component| glob(component).is_ok());
            prop_assert!(is_plain(&text) && glob(&text).is_ok() && components_compile);
        }
    }
}
