//! How a path of the workspace is written where bytes must become text.
//!
//! The spelling is [`crate::effect::path`]'s, so that receipts, journals and the operator's arguments mean the same
//! file. Here is what the room needs beyond it: any path at all, and text that is safe to show. Nothing here touches
//! a file system.

use crate::effect::path as spelling;
use std::{
    ffi::OsString,
    fmt::Write as _,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

pub use crate::effect::path::{from_workspace_path as unspell, BadPath};

/// Spells a path: of the workspace, as [`crate::effect::Resource::Workspace`] wants it, or any other.
///
/// Control characters stay as they are. For a terminal use [`printable`].
pub fn spell(path: &Path) -> String {
    spelling::escape(path.as_os_str().as_bytes())
}

/// Reads what [`spell`] wrote of any path: an absolute one of the host, a link's target.
///
/// # Errors
/// [`BadPath::Escape`].
pub fn unspell_any(text: &str) -> Result<PathBuf, BadPath> {
    spelling::unescape(text).map(|bytes| PathBuf::from(OsString::from_vec(bytes)))
}

/// Spells a path for a person: as [`spell`], with control characters escaped too, so that a name cannot steer a
/// terminal or begin a line of its own.
pub fn printable(path: &Path) -> String {
    escape_controls(&spell(path))
}

/// Replaces everything that a terminal could obey by a visible escape, and the characters that reorder or hide text;
/// see [`spelling::is_hostile`].
pub fn escape_controls(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            character if (character as u32) < 0x20 || character == '\u{7f}' => {
                let _ = write!(safe, "\\x{:02x}", character as u32);
            }
            character if spelling::is_hostile(character) => {
                let _ = write!(safe, "\\u{{{:x}}}", character as u32);
            }
            _ => safe.push(character),
        }
    }
    safe
}

/// Serialises paths in the spelling of [`spell`], for `#[serde(with = "…")]`.
pub mod spelled {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::path::{Path, PathBuf};

    /// Writes the spelling.
    pub fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::spell(path))
    }

    /// Reads the spelling.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        super::unspell(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ffi::OsStr;

    proptest! {
        #[test]
        fn spelling_is_reversible(names in proptest::collection::vec("[^/\0]{1,8}", 1..4), raw in any::<u8>()) {
            let mut bytes = names.join("/").into_bytes();
            if raw != 0 && raw != b'/' {
                bytes.push(raw);
            }
            let path = PathBuf::from(OsString::from_vec(bytes));
            prop_assert_eq!(unspell_any(&spell(&path)).unwrap(), path.clone());
            if let Ok(read) = unspell(&spell(&path)) {
                prop_assert_eq!(read, path);
            }
        }

        #[test]
        fn printable_text_never_holds_a_control_character(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let text = printable(Path::new(OsStr::from_bytes(&bytes)));
            prop_assert!(!text.chars().any(char::is_control));
        }
    }

    #[test]
    fn a_path_that_could_leave_the_workspace_is_refused() {
        for text in ["/etc", "..", "a/../b", "./a", "a//b", "a/", "a/.", "a\0b"] {
            assert!(!matches!(unspell(text), Ok(_) | Err(BadPath::Escape(_))), "{text:?}");
        }
        for text in ["\\", "\\x", "\\x0", "\\xzz", "\\n"] {
            assert!(matches!(unspell(text), Err(BadPath::Escape(_))), "{text:?}");
        }
        assert_eq!(unspell("").unwrap(), PathBuf::new());
    }
}
