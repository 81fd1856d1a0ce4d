//! How a path of the workspace is written in an effect, so that two spellings of one path give one resource.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Component, Path, PathBuf},
};

/// A path that has no place in the workspace, or a text that is not how one is written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPath {
    /// It begins at the host's root.
    #[error("`{0}` is absolute; name it relative to the workspace")]
    Absolute(String),
    /// It leads upwards.
    #[error("`{0}` holds `..`; name the file below the workspace that is meant")]
    Upwards(String),
    /// It holds a zero byte, which no file's name can.
    #[error("`{0}` holds a zero byte, which no file's name can")]
    Zero(String),
    /// A backslash is not followed by `\` or by `x` and two hexadecimal digits of a byte that needs it.
    #[error("`{0}` is not a written path: after `\\` comes `\\` or, for a byte that is not UTF-8, `x` and two lower-case hexadecimal digits")]
    Escape(String),
    /// It could be written shorter: `.`, `//` or a slash at the end.
    #[error("`{0}` is not the shortest spelling of its path; leave out `.`, double slashes and the slash at the end")]
    Spelling(String),
}

/// Writes a path relative to the workspace as a resource: without `.` and double slashes, `""` for the root itself.
///
/// Bytes that are not UTF-8 become `\xNN` in lower case, a backslash `\\`. The path is taken as it is spelled; no link
/// is followed and nothing is looked up.
///
/// # Errors
///
/// For an absolute path, one with `..`, and one with a zero byte.
pub fn workspace_path(path: &Path) -> Result<String, BadPath> {
    let shown = || escape(path.as_os_str().as_bytes());
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(BadPath::Zero(shown().replace('\0', "\\x00")));
    }
    let mut written = String::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => {
                if !written.is_empty() {
                    written.push('/');
                }
                written.push_str(&escape(name.as_bytes()));
            }
            Component::CurDir => {}
            Component::ParentDir => return Err(BadPath::Upwards(shown())),
            Component::RootDir | Component::Prefix(_) => return Err(BadPath::Absolute(shown())),
        }
    }
    Ok(written)
}

/// The inverse of [`workspace_path`]: only a text that it writes is read, so one path has one text.
///
/// # Errors
///
/// For any other text.
pub fn from_workspace_path(written: &str) -> Result<PathBuf, BadPath> {
    let bytes = unescape(written)?;
    let path = PathBuf::from(OsString::from_vec(bytes));
    if workspace_path(&path)? != written {
        // Either a byte was escaped that need not be, or the path is not the shortest.
        let escaped = escape(path.as_os_str().as_bytes()) != written;
        let owned = written.to_owned();
        return Err(if escaped { BadPath::Escape(owned) } else { BadPath::Spelling(owned) });
    }
    Ok(path)
}

/// Bytes as text that can be read back: what is not UTF-8 as `\xNN`, a backslash as `\\`.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character == '\\' {
                text.push('\\');
            }
            text.push(character);
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// The inverse of [`escape`]. It reads more than that writes: a byte may be escaped that need not be.
///
/// # Errors
///
/// [`BadPath::Escape`] for a backslash that begins neither `\\` nor `\x` and two hexadecimal digits.
pub fn unescape(text: &str) -> Result<Vec<u8>, BadPath> {
    let bad = || BadPath::Escape(text.to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = match (first, after) {
            (b'\\', [b'\\', after @ ..]) => {
                bytes.push(b'\\');
                after
            }
            (b'\\', [b'x', high, low, after @ ..]) => {
                let mut byte = [0];
                hex::decode_to_slice([*high, *low], &mut byte).map_err(|_not_digits| bad())?;
                bytes.push(byte[0]);
                after
            }
            (b'\\', _) => return Err(bad()),
            (other, after) => {
                bytes.push(*other);
                after
            }
        };
    }
    Ok(bytes)
}

/// Whether a character could steer a terminal, reorder a line or go unseen in it: controls, Unicode's bidirectional
/// controls, and what has no width or is only filled with (Unicode technical report 36). Names of files may hold any of
/// them, so what shows a name escapes them.
pub fn is_hostile(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

/// A path as one word of a shell's command line that means just itself, for a hint that people paste.
pub fn shell_word(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./+,:@%=-".contains(&byte);
    let quoted = match !text.is_empty() && text.bytes().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    };
    match text.starts_with('-') {
        true => format!("-- {quoted}"),
        false => quoted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ffi::OsStr;

    fn bytes(bytes: &[u8]) -> &Path {
        Path::new(OsStr::from_bytes(bytes))
    }

    #[test]
    fn two_spellings_of_one_path_are_written_alike() {
        for spelling in ["a/b", "./a/b", "a//b", "a/./b", "a/b/", "a/b/."] {
            assert_eq!(workspace_path(Path::new(spelling)).unwrap(), "a/b", "{spelling}");
        }
        for spelling in ["", ".", "./", "./."] {
            assert_eq!(workspace_path(Path::new(spelling)).unwrap(), "", "{spelling}");
        }
    }

    #[test]
    fn odd_bytes_are_escaped() {
        assert_eq!(workspace_path(bytes(b"a\xff/b\\x41")).unwrap(), r"a\xff/b\\x41");
        assert_eq!(workspace_path(Path::new("na\u{ef}ve \n")).unwrap(), "na\u{ef}ve \n");
    }

    #[test]
    fn a_path_that_leads_out_is_refused() {
        for (path, error) in [
            (&b"/etc"[..], BadPath::Absolute("/etc".into())),
            (b"//etc", BadPath::Absolute("//etc".into())),
            (b"..", BadPath::Upwards("..".into())),
            (b"a/../b", BadPath::Upwards("a/../b".into())),
            (b"a\0b", BadPath::Zero("a\\x00b".into())),
        ] {
            assert_eq!(workspace_path(bytes(path)), Err(error));
        }
    }

    #[test]
    fn only_the_one_spelling_is_read() {
        assert_eq!(from_workspace_path(r"a\xff"), Ok(bytes(b"a\xff").to_owned()));
        for (written, is_escape) in [
            (r"a\x41", true),
            (r"a\xFF", true),
            (r"a\", true),
            (r"a\y", true),
            (r"a\xf", true),
            (r"\xc3\xa9", true),
            ("a//b", false),
            ("./a", false),
            ("a/", false),
            ("/a", false),
            ("../a", false),
            (r"a\x00", false),
            (r"\x2e\x2e", false),
        ] {
            let error = from_workspace_path(written).expect_err(written);
            assert_eq!(matches!(error, BadPath::Escape(_)), is_escape, "{written}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(names in prop::collection::vec(prop::collection::vec(1u8.., 1..6), 0..4)) {
            let path = PathBuf::from(OsString::from_vec(names.join(&b'/')));
            if let Ok(written) = workspace_path(&path) {
                let read = from_workspace_path(&written).unwrap();
                prop_assert_eq!(workspace_path(&read).unwrap(), written);
                prop_assert!(read.components().eq(path.components().filter(|part| *part != Component::CurDir)));
            }
        }

        #[test]
        fn any_text_is_read_or_refused_and_never_leads_out(text in ".{0,12}|[a./\\\\x02e]{0,12}") {
            if let Ok(path) = from_workspace_path(&text) {
                prop_assert!(path.components().all(|part| matches!(part, Component::Normal(_))));
                prop_assert_eq!(workspace_path(&path).unwrap(), text);
            }
        }
    }

    #[test]
    fn a_pasted_path_means_itself() {
        let table = [
            ("a/b.c", "a/b.c"),
            (".env.$(touch x)", "'.env.$(touch x)'"),
            ("it's", "'it'\\''s'"),
            ("-rf/.env", "-- -rf/.env"),
            ("", "''"),
        ];
        for (path, word) in table {
            assert_eq!(shell_word(path), word);
        }
    }
}
