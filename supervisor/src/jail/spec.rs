//! From a policy to a plan: the view, the ids, the environment, as data.
//!
//! Nothing here changes anything on the machine. The plan can be printed, tested and written into a receipt; the
//! shim carries it out.

use super::{
    certificates,
    profile::{self, ProfileError, Variables},
};
use crate::effect::{Digest, RunId};
use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};
use tollgate_shim::protocol::{
    self, Access, Bytes, Enforcement, Filter, Ids, Launcher, Layer, Masked, Mount, Plan, Terminal, Watch,
};

/// The private home of every jail.
pub const HOME: &str = "/home/agent";
/// Where the run's own socket, client and library are.
pub const OWN: &str = "/run/tollgate";
/// Where programs are looked for when the caller's PATH names nothing that the view shows.
const STANDARD_PATH: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// The first host user id for jails that root starts. From the range that no allocator uses, as systemd's UIDS-GIDS
/// document lists them (1879048192 to 2147483647).
const FIRST_RUN_UID: u32 = 1_900_000_000;
/// How many of them there are.
const RUN_UIDS: u32 = 100_000_000;
/// Bounds of the private /tmp, home and /dev/shm: memory that the run's memory limit counts too.
const TMP_BYTES: u64 = 2 << 30;
/// See [`TMP_BYTES`].
const HOME_BYTES: u64 = 2 << 30;
/// See [`TMP_BYTES`].
const SHM_BYTES: u64 = 1 << 30;
/// The bound of the empty stand-in for a workspace that is not shown. Nothing can be written to it.
const HIDDEN_BYTES: u64 = 4096;
/// Directories that cannot be a workspace, because the view makes or shows them itself.
const NOT_A_WORKSPACE: [&str; 13] =
    ["/", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/proc", "/sys", "/dev", "/boot", "/run"];
/// What is masked if the workspace holds it, because it is a key to something else.
const SENSITIVE: [&str; 13] = [
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".config/tollgate",
    ".kube",
    ".docker",
    ".netrc",
    ".git-credentials",
    ".password-store",
    ".local/share/keyrings",
];

/// One step of a view, before it is tied to a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewStep {
    /// A host path shown.
    Bind(Bind),
    /// A link of the private root.
    Symlink {
        /// What it points to.
        to: PathBuf,
        /// Where it is.
        target: PathBuf,
    },
    /// A fresh /proc.
    Proc {
        /// Where.
        target: PathBuf,
    },
    /// A minimal /dev.
    Dev {
        /// Where.
        target: PathBuf,
    },
    /// A private, bounded file system.
    Tmpfs {
        /// Where.
        target: PathBuf,
        /// Its bound.
        bytes: u64,
        /// The mode of its root.
        mode: u32,
    },
    /// A directory of the private root.
    Dir {
        /// Where.
        target: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// A host path shown at a path of the view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bind {
    /// On the host.
    pub source: PathBuf,
    /// In the view.
    pub target: PathBuf,
    /// Whether it can be written.
    pub access: Access,
    /// Whether it may be missing on the host.
    pub presence: Presence,
}

/// Whether something may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It may not.
    Required,
    /// It may.
    Optional,
}

/// How the program sees its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Through an overlay whose upper layer is the run's own.
    Overlay,
    /// As a copy of the run's own, where an overlay is refused.
    Mirror,
    /// Read-only.
    ReadOnly,
    /// Not at all: an empty directory in its place.
    Hidden,
}

/// Who starts the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
    /// Login name.
    pub name: String,
    /// Whether the caller may act for other users of the host.
    pub privilege: Privilege,
}

/// Whether a caller may act for other users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// User 0 of the host: the jail gets an id of its own, and the views are mapped.
    Root,
    /// Anyone else, user 0 of somebody's user namespace included.
    Ordinary,
}

/// Everything a plan is made from.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The run.
    pub run: RunId,
    /// The profile's text.
    pub profile: String,
    /// Further host folders or files to show read-only.
    pub views: Vec<Bind>,
    /// The folder of the run, canonical.
    pub workspace: PathBuf,
    /// How it is seen.
    pub store: Store,
    /// Paths of the workspace that the policy hides.
    pub hidden: Vec<PathBuf>,
    /// Where in it the program starts.
    pub directory: PathBuf,
    /// The argument vector.
    pub command: Vec<OsString>,
    /// Variables that pass, and those that are set.
    pub environment: Vec<(OsString, OsString)>,
    /// The caller's own PATH, of which the visible directories are kept.
    pub path: OsString,
    /// The run's folder in the state directory.
    pub run_dir: PathBuf,
    /// The state directory, which no view may show.
    pub state_dir: PathBuf,
    /// The shim's file.
    pub shim: PathBuf,
    /// Who starts it.
    pub caller: Caller,
    /// Resource limits.
    pub rlimits: Vec<(u32, u64, u64)>,
    /// A terminal, if any of the caller's streams is one.
    pub terminal: Option<Terminal>,
    /// The compiled filters.
    pub filters: Vec<Filter>,
    /// Calls that are looked at.
    pub observed: Vec<i64>,
    /// Strict or best effort.
    pub enforcement: Enforcement,
    /// Who makes the namespaces.
    pub launcher: Launcher,
    /// Layers left out, in test builds.
    pub without: Vec<Layer>,
    /// The network that leads to the supervisor, if the run has one.
    pub network: Option<Network>,
}

/// What a jail with a network is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// Ports of the host's loopback that the program reaches at its own.
    pub host_ports: Vec<u16>,
    /// Ports that the policy names, for a kernel that cannot redirect all of them.
    pub ports: Vec<u16>,
    /// The certificate of the run's own authority, in PEM.
    pub authority_pem: Vec<u8>,
    /// The key store of trusted certificates that Java reads, if the host has a Java.
    pub java_truststore: Option<Vec<u8>>,
}

impl Network {
    /// What a run needs whose authority has this certificate, for the programs of this host.
    pub fn new(host_ports: Vec<u16>, ports: Vec<u16>, authority_pem: Vec<u8>) -> Network {
        let java_truststore = certificates::java_truststore(&authority_pem);
        // What an address without a port means is always among them.
        let ports: BTreeSet<u16> = ports.into_iter().chain([80, 443]).collect();
        let ports = ports.into_iter().collect();
        Network { host_ports, ports, authority_pem, java_truststore }
    }
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The profile is not one.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The folder cannot be a workspace.
    #[error(
        "{path} cannot be a workspace: the jail makes or shows it itself; change into a project's folder, or name one \
         with --workspace"
    )]
    NotAWorkspace {
        /// The folder.
        path: PathBuf,
    },
    /// Something about the workspace cannot be read.
    #[error("the workspace {path}: {source}")]
    Workspace {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Makes the plan.
pub fn plan(inputs: Inputs) -> Result<Plan, SpecError> {
    check_workspace(&inputs.workspace)?;
    let ids = ids(&inputs)?;
    let variables = Variables {
        workspace: inputs.workspace.clone(),
        home: HOME.into(),
        tmp_bytes: TMP_BYTES,
        home_bytes: HOME_BYTES,
    };
    let steps = profile::parse(&inputs.profile, &variables)?;
    let mut mounts: Vec<Mount> = Vec::new();
    let mut shown: Vec<PathBuf> = vec![inputs.workspace.clone()];
    // Nearest the root first, so that a folder shown inside another lies over it.
    let mut views = inputs.views.clone();
    let made_anew = |target: &Path| inputs.network.is_some() && certificates::is_made(target);
    views.retain(|view| !made_anew(&view.target));
    views.sort_by_key(|view| view.target.components().count());
    for step in steps {
        if let ViewStep::Bind(bind) = &step {
            if made_anew(&bind.target) {
                continue;
            }
            shown.push(bind.target.clone());
            if bind.target == inputs.workspace {
                mounts.extend(views.iter().map(view_mount));
                mounts.extend(made_files(&inputs, &ids));
                if let Some(network) = &inputs.network {
                    let store = network.java_truststore.as_deref();
                    mounts.extend(certificates::mounts(&network.authority_pem, store, &views));
                }
                mounts.push(workspace_mount(&inputs));
                continue;
            }
        }
        mounts.push(mount(step));
    }
    shown.extend(views.iter().map(|view| view.target.clone()));
    mounts.extend(masks(&inputs));
    mounts.extend(own_mounts(&inputs));
    mounts.extend(inputs.network.as_ref().map(|network| certificates::authority(&network.authority_pem)));
    let environment = environment(&inputs, &shown);
    let network = inputs.network.filter(|_| !inputs.without.contains(&Layer::Network));
    let network = network.map(|Network { host_ports, ports, .. }| protocol::Network { host_ports, ports });
    Ok(Plan {
        run: inputs.run.0,
        ids,
        mounts,
        env: environment,
        cwd: inputs.directory.into(),
        command: inputs.command.into_iter().map(Bytes::from).collect(),
        rlimits: inputs.rlimits,
        terminal: inputs.terminal,
        filters: inputs.filters,
        watch: Watch { observed: inputs.observed, refused_with: libc::EPERM, asked: Vec::new() },
        enforcement: inputs.enforcement,
        launcher: inputs.launcher,
        workspace: inputs.workspace.into(),
        network,
        without: inputs.without,
    })
}

/// Whether a folder can be a workspace at all.
pub fn check_workspace(path: &Path) -> Result<(), SpecError> {
    let refused = NOT_A_WORKSPACE.iter().any(|own| match *own {
        "/" => path == Path::new("/"),
        // Below /run lie the user's own runtime folders, which may well hold a project; the others are whole.
        "/run" => path == Path::new("/run") || path.starts_with(OWN),
        own => path.starts_with(own) && !path.starts_with("/dev/shm/"),
    });
    // The private home is mounted below it.
    match refused || path == Path::new("/home") || path == Path::new("/var") {
        true => Err(SpecError::NotAWorkspace { path: path.to_owned() }),
        false => Ok(()),
    }
}

/// Which host user runs the jail, and what it looks like inside.
fn ids(inputs: &Inputs) -> Result<Ids, SpecError> {
    let caller = &inputs.caller;
    Ok(match caller.privilege {
        Privilege::Ordinary => {
            let visible = |id: u32| if id == 0 { 1000 } else { id };
            Ids {
                host_uid: caller.uid,
                host_gid: caller.gid,
                jail_uid: visible(caller.uid),
                jail_gid: visible(caller.gid),
                owner: None,
            }
        }
        Privilege::Root => {
            let found = std::fs::metadata(&inputs.workspace)
                .map_err(|source| SpecError::Workspace { path: inputs.workspace.clone(), source })?;
            let own = run_uid(&inputs.run);
            let visible = |id: u32| if id == 0 { 1000 } else { id };
            Ids {
                host_uid: own,
                host_gid: own,
                jail_uid: visible(found.uid()),
                jail_gid: visible(found.gid()),
                owner: Some((found.uid(), found.gid())),
            }
        }
    })
}

/// The host user id of a run that root starts: no other run's, but for a chance of one in a hundred million.
pub fn run_uid(run: &RunId) -> u32 {
    let Digest([a, b, c, d, ..]) = Digest::of(run.0.as_bytes());
    FIRST_RUN_UID + u32::from_be_bytes([a, b, c, d]) % RUN_UIDS
}

fn mount(step: ViewStep) -> Mount {
    match step {
        // A system that never merged /bin into /usr shows the real directory.
        ViewStep::Symlink { target, .. } if std::fs::symlink_metadata(&target).is_ok_and(|found| found.is_dir()) => {
            Mount::Bind {
                source: target.clone().into(),
                target: target.into(),
                access: Access::ReadOnly,
                optional: false,
            }
        }
        ViewStep::Symlink { to, target } => Mount::Symlink { to: to.into(), target: target.into() },
        ViewStep::Bind(bind) => match small_setting(&bind) {
            Some(content) => Mount::File { target: bind.target.into(), content: Bytes::Text(content), mode: 0o644 },
            None => Mount::Bind {
                source: bind.source.into(),
                target: bind.target.into(),
                access: bind.access,
                optional: bind.presence == Presence::Optional,
            },
        },
        ViewStep::Proc { target } => Mount::Proc { target: target.into() },
        ViewStep::Dev { target } => Mount::Dev { target: target.into(), shm_bytes: SHM_BYTES },
        ViewStep::Tmpfs { target, bytes, mode } => Mount::Tmpfs { target: target.into(), bytes, mode },
        ViewStep::Dir { target, mode } => Mount::Dir { target: target.into(), mode },
    }
}

/// The content of a small file of the host's /etc that everybody may read. A copy costs less than a mount, at the
/// start of a run and at its end, and a run has no use for a change made meanwhile.
fn small_setting(bind: &Bind) -> Option<String> {
    const MOST: u64 = 16 * 1024;
    if bind.access != Access::ReadOnly || !bind.source.starts_with("/etc") {
        return None;
    }
    let found = std::fs::metadata(&bind.source).ok()?;
    let everybody = found.mode() & 0o004 != 0;
    (found.is_file() && found.len() <= MOST && everybody).then(|| std::fs::read_to_string(&bind.source).ok())?
}

/// A user's view: always read-only, always so that its sockets and pipes lead nowhere.
fn view_mount(view: &Bind) -> Mount {
    Mount::View {
        source: view.source.clone().into(),
        target: view.target.clone().into(),
        optional: view.presence == Presence::Optional,
    }
}

fn workspace_mount(inputs: &Inputs) -> Mount {
    let target = Bytes::from(inputs.workspace.clone());
    match inputs.store {
        Store::Overlay => Mount::Overlay {
            lower: target.clone(),
            upper: inputs.run_dir.join("layer/upper").into(),
            work: inputs.run_dir.join("layer/work").into(),
            target,
        },
        Store::Mirror => Mount::Bind {
            source: inputs.run_dir.join("layer/mirror").into(),
            target,
            access: Access::ReadWrite,
            optional: false,
        },
        Store::ReadOnly => Mount::View { source: target.clone(), target, optional: false },
        Store::Hidden => Mount::Tmpfs { target, bytes: HIDDEN_BYTES, mode: 0o555 },
    }
}

/// /etc, as far as it is not the host's.
fn made_files(inputs: &Inputs, ids: &Ids) -> Vec<Mount> {
    let name = user_name(&inputs.caller);
    let file = |target: &str, content: String| Mount::File {
        target: target.into(),
        content: Bytes::Text(content),
        mode: 0o644,
    };
    let (uid, gid) = (ids.jail_uid, ids.jail_gid);
    let mut made = vec![
        file(
            "/etc/passwd",
            format!(
                "root:x:0:0:root:/root:/usr/sbin/nologin\n{name}:x:{uid}:{gid}:{name}:{HOME}:/bin/sh\n\
                 nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            ),
        ),
        file("/etc/group", format!("root:x:0:\n{name}:x:{gid}:\nnogroup:x:65534:\n")),
        file("/etc/hosts", format!("127.0.0.1 localhost {run}\n::1 localhost {run}\n", run = inputs.run)),
        file("/etc/hostname", format!("{}\n", inputs.run)),
        file("/etc/resolv.conf", resolver(inputs)),
        file(
            "/etc/nsswitch.conf",
            "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"
                .to_owned(),
        ),
        file("/etc/gitconfig", format!("[user]\n\tname = {name}\n\temail = {name}@{}.invalid\n", inputs.run)),
        file("/etc/shells", "/bin/sh\n/bin/bash\n".to_owned()),
        // What programs expect to be able to look into, empty.
        Mount::Dir { target: "/mnt".into(), mode: 0o755 },
        Mount::Dir { target: "/opt".into(), mode: 0o755 },
        Mount::Dir { target: "/srv".into(), mode: 0o755 },
        Mount::Dir { target: "/root".into(), mode: 0o755 },
    ];
    if inputs.network.is_some() {
        // Whoever looks a name up reads these (host.conf(5), gai.conf(5)); without them each run would be refused two
        // reads that mean nothing.
        made.push(file("/etc/host.conf", "multi on\n".to_owned()));
        made.push(file("/etc/gai.conf", String::new()));
    }
    made
}

fn resolver(inputs: &Inputs) -> String {
    match inputs.network {
        Some(_) => format!("nameserver {}\n", protocol::NAME_SERVER),
        // Nobody answers there: a lookup fails at once instead of waiting for a server that cannot be reached.
        None => "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n".to_owned(),
    }
}

fn user_name(caller: &Caller) -> &str {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    match caller.name.as_str() {
        "root" | "" => "agent",
        name if name.bytes().all(plain) => name,
        _ => "agent",
    }
}

/// The run's socket, client and Python library.
fn own_mounts(inputs: &Inputs) -> Vec<Mount> {
    let own = |name: &str| Bytes::from(Path::new(OWN).join(name));
    vec![
        Mount::Dir { target: OWN.into(), mode: 0o755 },
        Mount::Bind {
            source: inputs.run_dir.join("door/broker.sock").into(),
            target: own("broker.sock"),
            access: Access::ReadWrite,
            optional: false,
        },
        Mount::Bind {
            source: inputs.shim.clone().into(),
            target: own("bin/tollgate"),
            access: Access::ReadOnly,
            optional: false,
        },
        Mount::File {
            target: own("python/tollgate.py"),
            content: Bytes::Text(include_str!("../../../shim/python/tollgate.py").to_owned()),
            mode: 0o644,
        },
    ]
}

/// What the workspace holds and the program may not see.
fn masks(inputs: &Inputs) -> impl Iterator<Item = Mount> + '_ {
    let sensitive = SENSITIVE.iter().map(|name| inputs.workspace.join(name));
    let hidden = inputs.hidden.iter().map(|path| inputs.workspace.join(path));
    // The ledger and the policies, should they lie below: a program must never see its own receipts' store.
    let state = Some(inputs.state_dir.clone()).filter(|state| state.starts_with(&inputs.workspace));
    sensitive.chain(hidden).chain(state).filter_map(|path| {
        // A link leads past the view or to something else of the workspace, which is hidden by its own name.
        let found = std::fs::symlink_metadata(&path).ok().filter(|found| !found.is_symlink())?;
        let over = if found.is_dir() { Masked::Directory } else { Masked::File };
        Some(Mount::Mask { target: path.into(), over })
    })
}

fn environment(inputs: &Inputs, shown: &[PathBuf]) -> Vec<(Bytes, Bytes)> {
    let name = user_name(&inputs.caller).to_owned();
    let mut all: Vec<(OsString, OsString)> = vec![
        ("HOME".into(), HOME.into()),
        ("USER".into(), name.clone().into()),
        ("LOGNAME".into(), name.into()),
        ("SHELL".into(), "/bin/sh".into()),
        ("PATH".into(), search_path(&inputs.path, shown)),
        ("TOLLGATE_RUN".into(), inputs.run.0.clone().into()),
        ("TOLLGATE_SOCKET".into(), Path::new(OWN).join("broker.sock").into()),
        ("PYTHONPATH".into(), Path::new(OWN).join("python").into()),
    ];
    let passed = inputs.environment.iter().cloned();
    let passed: Vec<(OsString, OsString)> = match inputs.network {
        // What the caller set for the host's certificates and proxies means nothing in here.
        Some(_) => {
            passed.filter(|(name, _)| !certificates::names_a_proxy(name)).chain(certificates::variables()).collect()
        }
        None => passed.collect(),
    };
    for (name, value) in &passed {
        match all.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => value.clone_into(old),
            None => all.push((name.clone(), value.clone())),
        }
    }
    all.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// Our client's directory; the caller's that the view shows, in the caller's order; then the standard ones.
fn search_path(callers: &OsStr, shown: &[PathBuf]) -> OsString {
    let standard = STANDARD_PATH.map(PathBuf::from);
    let visible = |path: &PathBuf| {
        path.is_absolute() && (standard.contains(path) || shown.iter().any(|view| path.starts_with(view)))
    };
    let mut kept: Vec<PathBuf> = Vec::new();
    let callers = callers.as_bytes().split(|byte| *byte == b':').map(|one| PathBuf::from(OsStr::from_bytes(one)));
    // First our client's: a `tollgate` of the host's is of no use in there.
    for path in [Path::new(OWN).join("bin")].into_iter().chain(callers.filter(visible)).chain(standard.clone()) {
        if !kept.contains(&path) {
            kept.push(path);
        }
    }
    let mut joined = OsString::new();
    for path in kept {
        if !joined.is_empty() {
            joined.push(":");
        }
        joined.push(path);
    }
    joined
}
