//! Where the state lies.

use super::{Error, Result};
use std::{ffi::OsString, path::PathBuf};

/// The state directory: `$TOLLGATE_STATE`, else `$XDG_STATE_HOME/tollgate`, else `~/.local/state/tollgate`, where `~`
/// is `$HOME`, else what the password file says.
///
/// An empty variable counts as unset, as in the XDG base directory specification.
///
/// # Errors
///
/// [`Error::RelativeState`] for a relative path in one of them (the XDG specification says to ignore such a
/// `$XDG_STATE_HOME`; a ledger in a place nobody expects is worse than a message), [`Error::NoHome`] when nothing
/// names a place.
pub fn state_dir() -> Result<PathBuf> {
    resolve(|name| std::env::var_os(name), password_home)
}

fn resolve(variable: impl Fn(&str) -> Option<OsString>, home: impl Fn() -> Option<PathBuf>) -> Result<PathBuf> {
    let path = |name: &'static str| match variable(name).filter(|value| !value.is_empty()).map(PathBuf::from) {
        Some(path) if path.is_absolute() => Ok(Some(path)),
        Some(path) => Err(Error::RelativeState { variable: name, path }),
        None => Ok(None),
    };
    if let Some(state) = path("TOLLGATE_STATE")? {
        return Ok(state);
    }
    if let Some(base) = path("XDG_STATE_HOME")? {
        return Ok(base.join("tollgate"));
    }
    let home = match path("HOME")? {
        Some(home) => Some(home),
        None => home().filter(|home| home.is_absolute()),
    };
    home.map(|home| home.join(".local/state/tollgate")).ok_or(Error::NoHome)
}

fn password_home() -> Option<PathBuf> {
    nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten().map(|user| user.dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn with(variables: &[(&str, &str)], home: Option<&str>) -> Result<PathBuf> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        resolve(find, || home.map(PathBuf::from))
    }

    #[test]
    fn the_nearest_word_wins() {
        let all = [("TOLLGATE_STATE", "/t"), ("XDG_STATE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(with(&all, None).unwrap(), Path::new("/t"));
        assert_eq!(with(&all[1..], None).unwrap(), Path::new("/x/tollgate"));
        assert_eq!(with(&all[2..], None).unwrap(), Path::new("/h/.local/state/tollgate"));
        assert_eq!(with(&[], Some("/p")).unwrap(), Path::new("/p/.local/state/tollgate"));
        assert_eq!(with(&[("TOLLGATE_STATE", "")], Some("/p")).unwrap(), Path::new("/p/.local/state/tollgate"));
    }

    #[test]
    fn no_place_and_a_relative_place_are_refused() {
        assert!(matches!(with(&[], None), Err(Error::NoHome)));
        assert!(matches!(with(&[], Some("")), Err(Error::NoHome)));
        let error = with(&[("TOLLGATE_STATE", "state")], Some("/p")).unwrap_err();
        assert!(error.to_string().contains("TOLLGATE_STATE is `state`"), "{error}");
    }
}
