//! Paths that a user names among a run's changes: a path with all below it, or a pattern.

use crate::room::path::{printable, unspell, BadPath};
use globset::{GlobBuilder, GlobMatcher};
use std::path::{Path, PathBuf};

/// What was named.
#[derive(Clone, Debug)]
pub struct Selection {
    choices: Vec<Choice>,
}

#[derive(Clone, Debug)]
struct Choice {
    text: String,
    path: Option<PathBuf>,
    pattern: Option<GlobMatcher>,
}

/// Why a name cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SelectionError {
    /// It is no path of the workspace.
    #[error(transparent)]
    Path(#[from] BadPath),
    /// It is no pattern.
    #[error("`{text}` is no pattern: {source}")]
    Pattern {
        /// The text as given.
        text: String,
        /// Why.
        #[source]
        source: globset::Error,
    },
}

impl Selection {
    /// Reads what was typed: paths of the workspace, absolute ones in it, and patterns with `*`, `?`, `[…]` or `{…}`,
    /// of which `**` alone goes past a slash. None where nothing was typed, which means everything.
    ///
    /// # Errors
    /// [`SelectionError`].
    pub fn parse(texts: &[String], root: &Path) -> Result<Option<Selection>, SelectionError> {
        let choices = texts.iter().map(|text| Choice::parse(text, root)).collect::<Result<Vec<_>, _>>()?;
        Ok((!choices.is_empty()).then_some(Selection { choices }))
    }

    /// Whether this path, or a directory that it is in, was named.
    pub fn holds(&self, path: &Path) -> bool {
        self.choices.iter().any(|choice| choice.holds(path))
    }

    /// The first that names none of these.
    pub fn idle<'p>(&self, paths: impl Iterator<Item = &'p Path> + Clone) -> Option<String> {
        let idle = self.choices.iter().find(|choice| !paths.clone().any(|path| choice.holds(path)));
        idle.map(|choice| printable(Path::new(&choice.text)))
    }
}

impl Choice {
    fn parse(text: &str, root: &Path) -> Result<Choice, SelectionError> {
        let short = text.strip_prefix("./").unwrap_or(text);
        let trimmed = if short.len() > 1 { short.trim_end_matches('/') } else { short };
        let relative = match Path::new(trimmed).strip_prefix(root) {
            Ok(inside) => inside.to_string_lossy().into_owned(),
            Err(_) if trimmed == "." => String::new(),
            Err(_) => trimmed.to_owned(),
        };
        let pattern = match relative.contains(['*', '?', '[', '{']) {
            true => {
                let glob = GlobBuilder::new(&relative).literal_separator(true).build();
                let glob = glob.map_err(|source| SelectionError::Pattern { text: text.to_owned(), source })?;
                Some(glob.compile_matcher())
            }
            false => None,
        };
        let path = match unspell(&relative) {
            Ok(path) => Some(path),
            // A backslash may belong to the pattern.
            Err(_) if pattern.is_some() => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Choice { text: text.to_owned(), path, pattern })
    }

    fn holds(&self, path: &Path) -> bool {
        self.path.as_ref().is_some_and(|chosen| path.starts_with(chosen))
            || self.pattern.as_ref().is_some_and(|pattern| {
                path.ancestors().any(|part| !part.as_os_str().is_empty() && pattern.is_match(part))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(text: &str, path: &str) -> bool {
        let root = Path::new("/work/space");
        Selection::parse(&[text.to_owned()], root).unwrap().unwrap().holds(Path::new(path))
    }

    #[test]
    fn a_path_means_itself_and_what_is_below_and_a_pattern_what_it_matches() {
        let rows = [
            ("a", "a", true),
            ("a", "a/b", true),
            ("a/", "a/b", true),
            ("./a", "a", true),
            ("a", "ab", false),
            ("/work/space/a", "a/b", true),
            (".", "anything/at/all", true),
            ("*.rs", "x.rs", true),
            ("*.rs", "d/x.rs", false),
            ("**/*.rs", "d/x.rs", true),
            ("d*", "dir/inside", true),
            ("{a,b}", "b", true),
            ("odd[1]", "odd[1]", true),
            ("odd[1]", "odd1", true),
        ];
        for (text, path, expected) in rows {
            assert_eq!(holds(text, path), expected, "{text} {path}");
        }
    }

    #[test]
    fn what_leads_outside_is_refused_and_nothing_means_everything() {
        let root = Path::new("/work/space");
        for text in ["../a", "/etc/passwd", "a/../b"] {
            assert!(matches!(Selection::parse(&[text.to_owned()], root), Err(SelectionError::Path(_))), "{text}");
        }
        assert!(matches!(Selection::parse(&["a[".to_owned()], root), Err(SelectionError::Pattern { .. })));
        assert!(Selection::parse(&[], root).unwrap().is_none());
        let one = Selection::parse(&["a".to_owned(), "none*".to_owned()], root).unwrap().unwrap();
        assert_eq!(one.idle([Path::new("a/b")].into_iter()).as_deref(), Some("none*"));
    }
}
