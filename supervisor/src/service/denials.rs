//! What the jail's layers refused, as effects with a decision.
//!
//! The shim reports candidates: it sees that a path is not in the view, not whether the host has it. Here each is
//! held against the host, and only what the jail kept from the program becomes a receipt. A file that is nowhere is
//! a plain failure, as it would be without a jail.

use crate::{
    chain::Answer,
    effect::{self, jail, Door, Effect, Kind, Request, Resource, RoomId, Subject},
    jail::seccomp::syscall_name,
    policy::{
        search::{self, PolicyRef, SearchPath},
        Commands, Policy,
    },
};
use std::{
    ffi::OsStr,
    os::unix::{ffi::OsStrExt, fs::FileTypeExt},
    path::{Path, PathBuf},
};
use tollgate_shim::protocol::{Denied, Wanted};

/// What the judgement needs to know of the run.
pub struct Context {
    /// The workspace's path.
    pub workspace: PathBuf,
    /// Whether it is read-only for this run.
    pub read_only: bool,
    /// What a linked git worktree shares with its repository, which is shown read-only.
    pub shared_git: Option<PathBuf>,
    /// Who acts.
    pub subject: Subject,
    /// Where.
    pub room: Option<RoomId>,
    /// Whether it has a network, which takes connections and name lookups.
    pub network: bool,
}

/// The effect that was refused and the refusal, or none if the jail had no part in it.
pub fn judge(denied: &Denied, context: &Context) -> Option<(Effect, Answer)> {
    let object = denied.object.to_path();
    let (kind, resource, answer) = match denied.access {
        Wanted::Syscall => {
            let name = syscall_name(denied.syscall).map_or_else(|| denied.syscall.to_string(), str::to_owned);
            let answer = Answer::refused(
                "seccomp",
                format!("the system call `{name}` is not in the run's list"),
                "a policy can name another list with `[jail] seccomp`; `tollgate policy show` prints the one in use",
            );
            (Kind::ProcessSyscall, Resource::Syscall { name }, answer)
        }
        Wanted::Connect => connect(denied, &object, context)?,
        Wanted::Read | Wanted::Write | Wanted::Delete | Wanted::Execute => path(denied, &object, context)?,
    };
    let request = Request::Jail(jail::Request {
        syscall: syscall_name(denied.syscall).map_or_else(|| denied.syscall.to_string(), str::to_owned),
        errno: errno_name(denied.errno),
        process: denied.comm.to_os().to_string_lossy().into_owned(),
        pid: denied.pid,
    });
    let (subject, room) = (context.subject.clone(), context.room.clone());
    Some((Effect { kind, resource, subject, room, door: Door::Jail, request }, answer))
}

fn path(denied: &Denied, object: &Path, context: &Context) -> Option<(Kind, Resource, Answer)> {
    let kind = match denied.access {
        Wanted::Read => Kind::FsRead,
        Wanted::Delete => Kind::FsDelete,
        Wanted::Execute => Kind::ProcessExec,
        Wanted::Write | Wanted::Connect | Wanted::Syscall => Kind::FsWrite,
    };
    let shown = spelled(object);
    if let Ok(inside) = object.strip_prefix(&context.workspace) {
        let path = effect::path::workspace_path(inside).ok()?;
        if denied.errno == libc::EACCES {
            let answer = Answer::refused(
                "view",
                format!("`{shown}` is hidden from this run"),
                "it holds keys, or a `[[deny]]` rule on `fs/read` names it; copy what the program needs elsewhere",
            );
            return Some((kind, Resource::Workspace { path }, answer));
        }
        if denied.errno == libc::EOVERFLOW {
            let answer = Answer::refused(
                "view",
                format!(
                    "`{shown}` was not changed: it, or the folder that it is in, belongs to another user or to a group \
                     that the run does not have, and an overlay cannot copy that (EOVERFLOW)"
                ),
                "work on a copy with `--mirror`, or give it your own group with chgrp(1)",
            );
            return Some((kind, Resource::Workspace { path }, answer));
        }
        let answer = Answer::refused(
            "view",
            format!("`{shown}` was not changed: the workspace is read-only for this run"),
            "leave out `--read-only`, or choose a policy whose workspace is read-write",
        );
        return context.read_only.then_some((kind, Resource::Workspace { path }, answer));
    }
    // No run has a /sys, as some machines have none. Runtimes look there for processors and the like, do without, and
    // there is no flag that would show it: not a refusal that anybody can act on.
    if object.starts_with("/sys") && matches!(denied.access, Wanted::Read) {
        return None;
    }
    let resource = Resource::Host { path: shown.clone() };
    if let Some(common) = context.shared_git.as_ref().filter(|common| object.starts_with(common)) {
        if denied.errno == libc::EROFS {
            let answer = Answer::refused(
                "view",
                format!(
                    "`{shown}` was not changed: this folder is a linked git worktree, and what it shares with its \
                     repository is shown read-only"
                ),
                format!(
                    "the files themselves can be changed: commit on the host when the run is over, or work in a clone \
                     of {}",
                    spelled(common)
                ),
            );
            return Some((kind, resource, answer));
        }
    }
    if denied.errno == libc::EROFS {
        let answer = Answer::refused(
            "view",
            format!("`{shown}` was not changed: outside the workspace the view is read-only"),
            "write below the workspace, $HOME or /tmp; nothing else is ever written",
        );
        return Some((kind, resource, answer));
    }
    let on_host = |path: &Path| std::fs::symlink_metadata(path).is_ok();
    let (known, verb) = match denied.access {
        // Making something needs a place to make it in.
        Wanted::Write => (object.parent().is_some_and(on_host), "written"),
        Wanted::Delete => (on_host(object), "deleted"),
        Wanted::Execute => (on_host(object), "executed"),
        Wanted::Read | Wanted::Connect | Wanted::Syscall => (on_host(object), "read"),
    };
    let hint = match denied.access {
        Wanted::Read | Wanted::Execute => format!("show it, read-only, with `--view {}`", spelled(view_for(object))),
        _ => "write below the workspace, $HOME or /tmp; a folder elsewhere can only be shown read-only".to_owned(),
    };
    let reason = format!("`{shown}` was not {verb}: it is outside what the run's view shows");
    known.then(|| (kind, resource, Answer::refused("view", reason, hint)))
}

/// The narrowest folder that makes a file usable: for a program or library, its installation.
pub fn view_for(path: &Path) -> &Path {
    let parent = path.parent().unwrap_or(path);
    // A directory that each run has one of its own of, and the root: only what lies in them can be shown.
    if ["/etc", "/", "/var", "/run", "/home", "/tmp", "/root"].iter().any(|made| parent == Path::new(made)) {
        return path;
    }
    match parent.file_name().map(OsStr::as_bytes) {
        // An installation; but a folder of a home that also holds a user's keys and settings is none.
        Some(b"bin" | b"sbin" | b"lib" | b"shims") if !parent.parent().is_some_and(holds_more) => {
            parent.parent().unwrap_or(parent)
        }
        _ if path.is_dir() => path,
        _ => parent,
    }
}

/// Whether a folder with programs in its `bin` has more in it than an installation: a home, or one of the folders of a
/// home in which settings, credentials and the data of all kinds of programs lie.
fn holds_more(folder: &Path) -> bool {
    let own = folder.file_name().is_some_and(|name| name == ".local" || name == ".cargo");
    let of_home = folder.parent() == Some(Path::new("/home")) || folder == Path::new("/root");
    own || of_home || [".ssh", ".config", ".profile", ".bashrc"].iter().any(|name| folder.join(name).exists())
}

/// The file that a command's first word means on the host, looked up as a shell would.
pub fn on_host(program: &OsStr, path: Option<&std::ffi::OsString>, directory: &Path) -> Option<PathBuf> {
    let is_file = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|found| found.is_file());
    if program.as_bytes().contains(&b'/') {
        return Some(directory.join(program)).filter(is_file);
    }
    std::env::split_paths(path?).map(|one| one.join(program)).find(is_file)
}

/// The folders outside the usual view that a program needs: its own, that of the file it is a link to, and that of
/// the interpreter which its first line names.
pub fn views_for_program(program: &Path) -> Vec<PathBuf> {
    use std::io::Read;
    const SHOWN: [&str; 5] = ["/usr", "/bin", "/sbin", "/lib", "/lib64"];
    let mut needed = vec![program.to_owned()];
    needed.extend(program.canonicalize());
    let mut start = [0; 256];
    let read = std::fs::File::open(program).and_then(|mut file| file.read(&mut start)).unwrap_or_default();
    if let Some(line) = start[..read].strip_prefix(b"#!").and_then(|rest| rest.split(|byte| *byte == b'\n').next()) {
        let word = line.split(|byte| byte.is_ascii_whitespace()).find(|word| !word.is_empty());
        let interpreter = word.map(|word| PathBuf::from(OsStr::from_bytes(word)));
        needed.extend(interpreter.iter().flat_map(|path| [Some(path.clone()), path.canonicalize().ok()]).flatten());
    }
    let mut views: Vec<PathBuf> = Vec::new();
    for path in needed.iter().filter(|path| path.is_absolute() && !SHOWN.iter().any(|shown| path.starts_with(shown))) {
        let view = view_for(path).to_owned();
        if !views.iter().any(|known| view.starts_with(known)) {
            views.retain(|known| !known.starts_with(&view));
            views.push(view);
        }
    }
    views
}

/// A built-in policy that is made for this program and shows it, with what to start instead of the bare name where only
/// that leads to it.
pub fn policy_for_program(found: &Path, home: Option<&Path>) -> Option<(&'static str, Option<PathBuf>)> {
    let search = SearchPath { folders: Vec::new(), home: home.map(Path::to_owned) };
    let real = version_behind(found).or_else(|| found.canonicalize().ok());
    search::BUILTIN.iter().find_map(|(name, _)| {
        let policy = Policy::load(&PolicyRef::Builtin((*name).to_owned()), &search).ok()?;
        let shows = |path: &Path| {
            let named =
                matches!(policy.jail.commands, Commands::List(_)) && policy.jail.commands.admit(path.as_os_str());
            named && policy.jail.views.iter().any(|view| path.starts_with(&view.path))
        };
        match real.as_deref() {
            _ if shows(found) => Some((*name, None)),
            Some(real) if shows(real) => Some((*name, Some(real.to_owned()))),
            Some(_) | None => None,
        }
    })
}

/// The program that pyenv's stand-in would start: the one of its global version.
fn version_behind(stand_in: &Path) -> Option<PathBuf> {
    let shims = stand_in.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "shims"))?;
    let root = shims.parent()?;
    let text = std::fs::read_to_string(root.join("version")).ok()?;
    let version = text.split_whitespace().next().filter(|version| !version.contains('/') && *version != "..")?;
    let path = root.join("versions").join(version).join("bin").join(stand_in.file_name()?);
    path.is_file().then_some(path)
}

fn connect(denied: &Denied, object: &Path, context: &Context) -> Option<(Kind, Resource, Answer)> {
    let bytes = object.as_os_str().as_bytes();
    let shown = spelled(object);
    let (known, reason, hint) = match bytes {
        b"dns" => (
            true,
            "a name was not looked up: this run has no network".to_owned(),
            "let it reach a host by its name with `--allow HOST`, or have what it needs in the workspace before the run",
        ),
        [b'@', name @ ..] => (
            abstract_socket_exists(name),
            format!("`{shown}` is a socket of the host: the run's network namespace does not have it"),
            "sockets of the host are never shared with a run",
        ),
        [b'/', ..] => (
            std::fs::symlink_metadata(object).is_ok_and(|found| found.file_type().is_socket()),
            format!("`{shown}` is a socket of the host, which leads nowhere from inside the run"),
            "sockets of the host are never shared with a run",
        ),
        b"udp" => (
            true,
            "so many datagrams were refused that not each has a receipt that says where it was to go".to_owned(),
            "a run's network carries TCP connections and name lookups; stop what sends them",
        ),
        // What the network takes is no refusal of the jail's: this is what it cannot take.
        _ if context.network && denied.errno == libc::ECONNREFUSED => (
            true,
            format!(
                "no connection to {shown} was made: this kernel can take only those to ports that the policy names"
            ),
            "name the port in the policy, or use a kernel with nf_tables: `tollgate doctor` tells",
        ),
        _ if context.network => (
            true,
            format!(
                "no datagram was sent to {shown}: a run's network carries TCP connections and name lookups, not UDP"
            ),
            "nothing is needed where the program tries TCP next, as it does for HTTP/3; else turn its use of UDP off",
        ),
        _ => (
            true,
            format!("nothing was sent to {shown}: this run has no network but its own loopback"),
            "let it reach a host by its name with `--allow HOST`, or have what it needs in the workspace before the run",
        ),
    };
    known.then(|| (Kind::NetConnect, Resource::Address { to: shown }, Answer::refused("network", reason, hint)))
}

/// Whether the host has a socket of this abstract name (proc_net(5), `/proc/net/unix`).
fn abstract_socket_exists(name: &[u8]) -> bool {
    let wanted: Vec<u8> = [b"@", name].concat();
    let Ok(table) = std::fs::read("/proc/net/unix") else { return false };
    // The name is the last field, with `@` for its leading zero byte and for every other.
    table.split(|byte| *byte == b'\n').any(|line| {
        line.windows(wanted.len() + 1).next_back().is_some_and(|end| end[0] == b' ' && end[1..] == wanted[..])
    })
}

/// A path as text: bytes that are not UTF-8 as `\xNN`, a backslash doubled.
pub fn spelled(path: &Path) -> String {
    effect::path::escape(path.as_os_str().as_bytes())
}

fn errno_name(errno: i32) -> String {
    format!("{:?}", nix::errno::Errno::from_raw(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(access: Wanted, object: &str, errno: i32) -> Denied {
        Denied { syscall: libc::SYS_openat, access, object: object.into(), errno, pid: 2, comm: "sh".into(), times: 1 }
    }

    fn context(read_only: bool) -> Context {
        let subject = Subject { uid: 1000, run: None, agent: None };
        Context { workspace: "/w".into(), read_only, shared_git: None, subject, room: None, network: false }
    }

    #[test]
    fn a_file_that_is_nowhere_is_no_refusal() {
        assert!(judge(&denied(Wanted::Read, "/no/such/file", libc::ENOENT), &context(false)).is_none());
    }

    #[test]
    fn a_look_at_the_machine_that_no_run_is_shown_is_no_refusal_and_a_change_of_it_is() {
        let there = "/sys/kernel";
        assert!(judge(&denied(Wanted::Read, there, libc::ENOENT), &context(false)).is_none());
        assert!(judge(&denied(Wanted::Delete, there, libc::ENOENT), &context(false)).is_some());
    }

    #[test]
    fn a_hidden_file_is_a_refusal_with_the_flag_to_add() {
        let (effect, answer) = judge(&denied(Wanted::Read, "/etc/passwd", libc::ENOENT), &context(false)).unwrap();
        assert_eq!(effect.resource, Resource::Host { path: "/etc/passwd".into() });
        assert_eq!(effect.kind, Kind::FsRead);
        assert!(answer.hint.contains("--view /etc/passwd"), "{}", answer.hint);
    }

    #[test]
    fn a_write_into_a_read_only_workspace_is_a_refusal_and_into_a_writable_one_is_not() {
        let write = denied(Wanted::Write, "/w/a/b", libc::EROFS);
        assert_eq!(judge(&write, &context(true)).unwrap().0.resource, Resource::Workspace { path: "a/b".into() });
        assert!(judge(&write, &context(false)).is_none());
    }

    #[test]
    fn what_a_network_cannot_carry_is_refused_by_its_own_words() {
        let networked = Context { network: true, ..context(false) };
        let reason = |errno, context: &Context| {
            let (effect, answer) = judge(&denied(Wanted::Connect, "192.0.2.1:443", errno), context).unwrap();
            assert_eq!((effect.kind, answer.decided_by), (Kind::NetConnect, "network"));
            answer.reason
        };
        assert!(reason(libc::EPERM, &networked).contains("UDP"));
        assert!(reason(libc::ECONNREFUSED, &networked).contains("ports that the policy names"));
        assert!(reason(libc::ENETUNREACH, &context(false)).contains("no network but its own loopback"));
    }

    #[test]
    fn a_call_outside_the_list_is_named() {
        let call = Denied { syscall: libc::SYS_mount, ..denied(Wanted::Syscall, "", libc::EPERM) };
        assert_eq!(judge(&call, &context(false)).unwrap().0.resource, Resource::Syscall { name: "mount".into() });
    }

    #[test]
    fn the_view_for_a_program_is_its_installation() {
        assert_eq!(view_for(Path::new("/opt/tool/bin/tool")), Path::new("/opt/tool"));
        assert_eq!(view_for(Path::new("/srv/data/x.csv")), Path::new("/srv/data"));
        assert_eq!(view_for(Path::new("/home/u/.pyenv/shims/python")), Path::new("/home/u/.pyenv"));
        for kept in ["/home/u/.local/bin", "/home/u/.cargo/bin", "/home/u/bin", "/root/bin"] {
            assert_eq!(view_for(&Path::new(kept).join("tool")), Path::new(kept));
        }
    }
}
