//! How a path of the workspace is written where bytes must become text.
//!
//! Two spellings of one path give one text and the reverse, so that receipts, journals and the operator's arguments
//! mean the same file. Nothing here touches a file system.

use std::{
    ffi::{OsStr, OsString},
    fmt::Write as _,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Component, Path, PathBuf},
};

/// Spells a path as [`crate::effect::Resource::Workspace`] wants it.
///
/// Bytes that are not UTF-8 become `\xNN`, a backslash becomes `\\`; everything else stays as it is, control
/// characters too. For a terminal use [`printable`].
pub fn spell(path: &Path) -> String {
    let mut text = String::with_capacity(path.as_os_str().len());
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                _ => text.push(character),
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// A text that is no spelling of a path beneath the workspace.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPath {
    /// A backslash that begins neither `\\` nor `\xNN`.
    #[error("`{0}`: a backslash must be followed by `\\` or by `xNN` with two hexadecimal digits")]
    Escape(String),
    /// An absolute path, or one with `.`, `..`, empty components or a zero byte.
    #[error("`{0}`: give a path relative to the workspace, without `.` and `..`")]
    NotBeneath(String),
}

/// Reads what [`spell`] wrote.
///
/// # Errors
/// [`BadPath`] for a wrong escape and for a path that could name something outside the workspace.
pub fn unspell(text: &str) -> Result<PathBuf, BadPath> {
    let path = unspell_any(text)?;
    if is_beneath(&path) {
        Ok(path)
    } else {
        Err(BadPath::NotBeneath(text.to_owned()))
    }
}

/// As [`unspell`], for any path: an absolute one of the host, a link's target.
///
/// # Errors
/// [`BadPath::Escape`].
pub fn unspell_any(text: &str) -> Result<PathBuf, BadPath> {
    let bad = || BadPath::Escape(text.to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        if first != b'\\' {
            bytes.push(first);
            rest = tail;
            continue;
        }
        match tail.split_first() {
            Some((b'\\', tail)) => {
                bytes.push(b'\\');
                rest = tail;
            }
            Some((b'x', tail)) if tail.len() >= 2 => {
                let mut byte = [0; 1];
                hex::decode_to_slice(&tail[..2], &mut byte).map_err(|_| bad())?;
                bytes.push(byte[0]);
                rest = &tail[2..];
            }
            Some(_) | None => return Err(bad()),
        }
    }
    Ok(PathBuf::from(OsString::from_vec(bytes)))
}

/// Whether a path is relative and made of plain names only; the empty path, the root itself, is.
pub fn is_beneath(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() {
        return true;
    }
    !bytes.contains(&0)
        && bytes.split(|byte| *byte == b'/').all(|name| !matches!(name, b"" | b"." | b".."))
        && path.components().all(|component| matches!(component, Component::Normal(_)))
}

/// Spells a path for a person: as [`spell`], with control characters escaped too, so that a name cannot steer a
/// terminal or begin a line of its own.
pub fn printable(path: &Path) -> String {
    escape_controls(&spell(path))
}

/// Replaces everything that a terminal could obey by a visible escape: C0, DEL, C1, and the characters that reorder
/// or hide text (Unicode bidirectional controls, zero-width characters; Unicode technical report 36).
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
            '\u{80}'..='\u{9f}'
            | '\u{61c}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}'
            | '\u{feff}' => {
                let _ = write!(safe, "\\u{{{:x}}}", character as u32);
            }
            _ => safe.push(character),
        }
    }
    safe
}

/// The final name of a path; none for the root.
pub fn name(path: &Path) -> Option<&OsStr> {
    path.file_name()
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

    proptest! {
        #[test]
        fn spelling_is_reversible(names in proptest::collection::vec("[^/\0]{1,8}", 1..4), raw in any::<u8>()) {
            let mut bytes = names.join("/").into_bytes();
            if raw != 0 && raw != b'/' {
                bytes.push(raw);
            }
            let path = PathBuf::from(OsString::from_vec(bytes));
            prop_assume!(is_beneath(&path));
            prop_assert_eq!(unspell(&spell(&path)).unwrap(), path);
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
            assert!(matches!(unspell(text), Err(BadPath::NotBeneath(_))), "{text:?}");
        }
        for text in ["\\", "\\x", "\\x0", "\\xzz", "\\n"] {
            assert!(matches!(unspell(text), Err(BadPath::Escape(_))), "{text:?}");
        }
        assert_eq!(unspell("").unwrap(), PathBuf::new());
    }
}
