//! Where policies are found.
//!
//! A name is looked for in the user's folder, then the system's, then among the built-in policies. A file that is
//! found and cannot be read or is broken ends the search with an error: going on to the next place could only find
//! something that the user did not write.

use super::{
    compose,
    fault::{closest, PolicyError, Source},
    is_plain_name, Policy,
};
use crate::chain::admission::Home;
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// How a policy is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PolicyRef {
    /// A name to be searched for.
    Name(String),
    /// A built-in policy, whatever the folders hold; written `builtin:NAME`.
    Builtin(String),
    /// A file.
    Path(PathBuf),
}

impl PolicyRef {
    /// Reads a reference: a path if it has a slash or ends in `.toml`, else a name.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NotAReference`] for what can be neither.
    pub fn parse(text: &str) -> Result<PolicyRef, PolicyError> {
        if text.contains('/') || text.ends_with(".toml") {
            return Ok(PolicyRef::Path(PathBuf::from(text)));
        }
        let (name, kind): (&str, fn(String) -> PolicyRef) = match text.strip_prefix("builtin:") {
            Some(name) => (name, PolicyRef::Builtin),
            None => (text, PolicyRef::Name),
        };
        match is_plain_name(name) {
            true => Ok(kind(name.to_owned())),
            false => Err(PolicyError::NotAReference(text.chars().filter(|letter| !letter.is_control()).collect())),
        }
    }
}

impl Default for PolicyRef {
    /// The policy of a run that names none.
    fn default() -> PolicyRef {
        PolicyRef::Name("default".to_owned())
    }
}

impl std::fmt::Display for PolicyRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PolicyRef::Name(name) => f.write_str(name),
            PolicyRef::Builtin(name) => write!(f, "builtin:{name}"),
            PolicyRef::Path(path) => path.display().fmt(f),
        }
    }
}

/// The folders in which names are looked for. Computed by whoever knows the environment; nothing here reads it.
#[derive(Clone, Debug, Default)]
pub struct SearchPath {
    /// Folders, the first that has the name wins.
    pub folders: Vec<PathBuf>,
    /// The user's home, for `~/` in views and fixed variables.
    pub home: Option<PathBuf>,
}

impl SearchPath {
    /// The folders of a user: `$XDG_CONFIG_HOME/tollgate/policies` (else `~/.config/…`), then `/etc/tollgate/policies`.
    ///
    /// A relative `$XDG_CONFIG_HOME` counts as not set, as the XDG Base Directory Specification has it.
    pub fn of_user(config_home: Option<PathBuf>, home: Option<PathBuf>) -> SearchPath {
        let home = home.filter(|path| path.is_absolute());
        let config = config_home.filter(|path| path.is_absolute()).or_else(|| Some(home.as_ref()?.join(".config")));
        let user = config.map(|config| config.join("tollgate/policies"));
        SearchPath { folders: user.into_iter().chain([PathBuf::from("/etc/tollgate/policies")]).collect(), home }
    }
}

impl Policy {
    /// Finds a policy and composes it.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being found, read, understood or composed, each with its place.
    pub fn load(reference: &PolicyRef, search: &SearchPath) -> Result<Policy, PolicyError> {
        compose::compose(reference, search)
    }
}

/// A policy's text and where it is from.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub source: Source,
    pub home: Home,
    /// What [`Policy::sources`] shows, and what tells one file from another.
    pub path: PathBuf,
}

pub(super) fn find(reference: &PolicyRef, search: &SearchPath) -> Result<Found, PolicyError> {
    match reference {
        PolicyRef::Path(path) => read(path)?.ok_or_else(|| PolicyError::Unreadable {
            path: path.clone(),
            source: io::Error::from(io::ErrorKind::NotFound),
        }),
        PolicyRef::Builtin(name) => builtin(name).ok_or_else(|| unknown(name, search)),
        PolicyRef::Name(name) => {
            for folder in &search.folders {
                if let Some(found) = read(&folder.join(format!("{name}.toml")))? {
                    return Ok(found);
                }
            }
            builtin(name).ok_or_else(|| unknown(name, search))
        }
    }
}

fn unknown(name: &str, search: &SearchPath) -> PolicyError {
    let names = list(search);
    PolicyError::Unknown {
        name: name.to_owned(),
        suggestion: closest(name, names.iter().map(|entry| entry.name.as_str())).map(str::to_owned),
        searched: search.folders.iter().map(|f| f.display().to_string()).chain(["built-in policies".into()]).collect(),
    }
}

/// Reads a file; none where there is none.
fn read(path: &Path) -> Result<Option<Found>, PolicyError> {
    let unreadable = |source| PolicyError::Unreadable { path: path.to_owned(), source };
    // Without waiting: a FIFO that nobody writes to is no policy, and must not hold anybody up (fifo(7)).
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(unreadable(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    let mut text = String::new();
    file.take(LARGEST + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > LARGEST {
        return Err(PolicyError::TooLarge { path: path.to_owned(), limit: LARGEST });
    }
    let source = Source { name: path.display().to_string(), text: text.into() };
    Ok(Some(Found { source, home: Home::File, path: path.to_owned() }))
}

/// The most bytes of a policy file: hundreds of times the longest built-in one, and nothing to allocate.
const LARGEST: u64 = 1 << 20;

fn builtin(name: &str) -> Option<Found> {
    let (_, text) = BUILTIN.iter().find(|(builtin, _)| *builtin == name)?;
    let source = Source { name: format!("policies/{name}.toml (built in)"), text: (*text).into() };
    Some(Found { source, home: Home::Builtin, path: PathBuf::from(format!("policies/{name}.toml")) })
}

/// The built-in policies, in the order in which `tollgate policy list` shows them.
pub const BUILTIN: &[(&str, &str)] = &[
    ("default", include_str!("../../../policies/default.toml")),
    ("base", include_str!("../../../policies/base.toml")),
    ("shell", include_str!("../../../policies/shell.toml")),
    ("python", include_str!("../../../policies/python.toml")),
    ("pytest", include_str!("../../../policies/pytest.toml")),
    ("node", include_str!("../../../policies/node.toml")),
    ("rust", include_str!("../../../policies/rust.toml")),
    ("git", include_str!("../../../policies/git.toml")),
    ("read-only", include_str!("../../../policies/read-only.toml")),
    ("compute", include_str!("../../../policies/compute.toml")),
    ("packages-python", include_str!("../../../policies/packages-python.toml")),
    ("packages-node", include_str!("../../../policies/packages-node.toml")),
    ("github-read", include_str!("../../../policies/github-read.toml")),
];

/// The lists of system calls, by the name that `[jail] seccomp` uses.
const SECCOMP: &[(&str, &str)] = &[("default", include_str!("../../../policies/seccomp/default.json"))];

/// The text of a list of system calls.
pub fn seccomp_list(name: &str) -> Option<&'static str> {
    SECCOMP.iter().find(|(list, _)| *list == name).map(|(_, text)| *text)
}

/// The names that `[jail] seccomp` may have.
pub fn seccomp_names() -> impl Iterator<Item = &'static str> {
    SECCOMP.iter().map(|(name, _)| *name)
}

/// A policy that can be named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// The file that the name leads to; none for a built-in policy.
    pub path: Option<PathBuf>,
    /// What else has the name and is hidden by this one: files, and `built in`.
    pub hides: Vec<String>,
}

/// Every policy that can be named, sorted by name. Folders that cannot be read are passed over: loading from one fails.
pub fn list(search: &SearchPath) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let files = search.folders.iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten());
    for path in files.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "toml")) {
        match path.file_stem().and_then(|stem| stem.to_str()).filter(|name| is_plain_name(name)) {
            Some(name) => add(&mut entries, name, Some(path.clone())),
            None => continue,
        }
    }
    for (name, _) in BUILTIN {
        add(&mut entries, name, None);
    }
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    entries
}

fn add(entries: &mut Vec<Entry>, name: &str, path: Option<PathBuf>) {
    match entries.iter_mut().find(|entry| entry.name == name) {
        Some(entry) => entry.hides.push(path.map_or("built in".to_owned(), |path| path.display().to_string())),
        None => entries.push(Entry { name: name.to_owned(), path, hides: Vec::new() }),
    }
}
