//! One scratch world a test: a workspace, an outside folder, a home and a state folder, and a way to run Tollgate.

use crate::observe::{self, Snapshot};
use nix::{
    sys::signal::{kill, Signal},
    unistd::{chown, geteuid, Gid, Pid, Uid},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::{CommandExt, ExitStatusExt},
    },
    panic::{catch_unwind, AssertUnwindSafe},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The ordinary user when the suite runs as root: a number that no passwd file names, so that a lookup would fail.
pub const ORDINARY_UID: u32 = 64_321;

/// How long a command may take before the harness kills it and fails the test.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// What every sentinel file outside the jail holds; finding it in any output is an escape.
pub const SENTINEL: &str = "zq9-outside-sentinel";

/// Who runs Tollgate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// The superuser.
    Root,
    /// Somebody without privileges: [`ORDINARY_UID`] under root, else whoever runs the suite.
    Ordinary,
}

/// Which launcher builds the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// The shim's own.
    Native,
    /// The `bwrap` program.
    Bwrap,
}

/// One combination to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Who runs Tollgate.
    pub identity: Identity,
    /// Which launcher builds the jail.
    pub launcher: Launcher,
}

/// The identities that this suite can take on.
pub fn identities() -> Vec<Identity> {
    if geteuid().is_root() {
        vec![Identity::Root, Identity::Ordinary]
    } else {
        vec![Identity::Ordinary]
    }
}

/// The launchers that this machine has. A missing `bwrap` is said aloud, and is a failure where
/// `TOLLGATE_BWRAP_MUST_WORK=1` says that the machine has to have it.
pub fn launchers() -> Vec<Launcher> {
    let only = env::var("TOLLGATE_TEST_LAUNCHER").ok();
    let mut found = Vec::new();
    if only.as_deref() != Some("bwrap") {
        found.push(Launcher::Native);
    }
    if only.as_deref() == Some("native") {
        return found;
    }
    if on_path("bwrap") {
        found.push(Launcher::Bwrap);
    } else {
        assert!(
            env::var_os("TOLLGATE_BWRAP_MUST_WORK").is_none(),
            "TOLLGATE_BWRAP_MUST_WORK is set and `bwrap` is not"
        );
        eprintln!("skipped over the bwrap launcher: no `bwrap` on PATH");
    }
    found
}

/// By how much every patience is longer, on a machine that is emulated: `$TOLLGATE_TEST_SLOWNESS`.
pub fn slowness() -> u32 {
    env::var("TOLLGATE_TEST_SLOWNESS").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1)
}

/// Whether a program is on the path that the worlds use.
pub fn on_path(program: &str) -> bool {
    PATH.split(':').any(|folder| Path::new(folder).join(program).exists())
}

/// The path of every world.
pub const PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";

/// Runs a test as every identity over every launcher, and fails naming each way that failed.
pub fn every_way(test: impl Fn(&World)) {
    let launchers = launchers();
    each(
        identities().into_iter().flat_map(|identity| launchers.iter().map(move |&launcher| Way { identity, launcher })),
        test,
    )
}

/// Runs a test as every identity over the native launcher.
pub fn every_identity(test: impl Fn(&World)) {
    each(identities().into_iter().map(|identity| Way { identity, launcher: Launcher::Native }), test)
}

fn each(ways: impl Iterator<Item = Way>, test: impl Fn(&World)) {
    let mut failed = Vec::new();
    for way in ways {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let world = World::new(way);
            test(&world);
        }));
        if outcome.is_err() {
            eprintln!("^^^ {way:?}\n");
            failed.push(way);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Where the programs under test are: `tollgate` and `tollgate-shim` beside each other, reachable by any user.
///
/// `$TOLLGATE_BIN` names `tollgate`; else it lies in the target folder of this test executable. A folder that the
/// ordinary user cannot enter is copied to a temporary one, named after the build so that it is made once.
pub fn binaries() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let tollgate = match env::var_os("TOLLGATE_BIN") {
            Some(path) => PathBuf::from(path),
            None => {
                let test = env::current_exe().expect("/proc/self/exe is readable");
                let deps = test.parent().expect("a test executable lies in a folder");
                deps.parent().expect("the folder is target/PROFILE/deps").join("tollgate")
            }
        };
        assert!(tollgate.exists(), "{} is missing: build it with `cargo build`", tollgate.display());
        let folder = tollgate.parent().expect("a file lies in a folder").to_path_buf();
        assert!(folder.join("tollgate-shim").exists(), "tollgate-shim is missing beside {}", tollgate.display());
        if folder.ancestors().all(|part| fs::metadata(part).is_ok_and(|meta| meta.mode() & 0o005 == 0o005)) {
            return folder;
        }
        copy_binaries(&folder)
    })
}

fn copy_binaries(folder: &Path) -> PathBuf {
    let build = fs::metadata(folder.join("tollgate")).expect("checked to exist");
    let shim = fs::metadata(folder.join("tollgate-shim")).expect("checked to exist");
    let copy = env::temp_dir().join(format!(
        "tollgate-tests-bin-{}-{}-{}",
        geteuid(),
        build.mtime_nsec() ^ build.mtime(),
        shim.mtime_nsec() ^ shim.mtime()
    ));
    if copy.join("complete").exists() {
        return copy;
    }
    fs::create_dir_all(&copy).expect("a temporary folder can be made");
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).expect("our own folder");
    for name in ["tollgate", "tollgate-shim"] {
        let partial = copy.join(format!("{name}.{}", std::process::id()));
        fs::copy(folder.join(name), &partial).expect("a program can be copied");
        fs::rename(&partial, copy.join(name)).expect("a copy can be put in place");
    }
    fs::write(copy.join("complete"), "").expect("our own folder");
    copy
}

/// A folder that lies below no private folder of a jail. A name below /tmp means the jail's own /tmp there, so a read
/// of it is no refusal and has no receipt. Where other users cannot reach the target folder, /tmp has to do.
fn apart_from_tmp() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is above").join("target");
    if !target.ancestors().all(|part| fs::metadata(part).is_ok_and(|meta| meta.mode() & 0o005 == 0o005)) {
        return env::temp_dir();
    }
    let worlds = target.join("worlds");
    fs::create_dir_all(&worlds).expect("the target folder is ours");
    worlds
}

/// A scratch world.
pub struct World {
    base: TempDir,
    apart: TempDir,
    /// Who runs Tollgate here, over which launcher.
    pub way: Way,
    /// The folder that runs have as their workspace.
    pub workspace: PathBuf,
    /// `$OUT`: a folder outside every grant, with a sentinel file `s`.
    pub out: PathBuf,
    /// The caller's home folder.
    pub home: PathBuf,
    /// `TOLLGATE_STATE`.
    pub state: PathBuf,
    /// `XDG_RUNTIME_DIR`.
    pub runtime: PathBuf,
    /// `TMPDIR`.
    pub temp: PathBuf,
}

impl World {
    /// Makes a world for this way.
    pub fn new(way: Way) -> World {
        let base = tempfile::Builder::new().prefix("tgw-").tempdir().expect("a temporary folder can be made");
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).expect("our own folder");
        let root = base.path().canonicalize().expect("the folder was just made");
        let apart = tempfile::Builder::new().prefix("tgo-").tempdir_in(apart_from_tmp()).expect("a folder can be made");
        fs::set_permissions(apart.path(), fs::Permissions::from_mode(0o755)).expect("our own folder");
        let outside = apart.path().canonicalize().expect("the folder was just made");
        let world = World {
            way,
            workspace: root.join("w"),
            out: outside.join("out"),
            home: root.join("home"),
            state: root.join("state"),
            runtime: outside.join("runtime"),
            temp: root.join("temp"),
            base,
            apart,
        };
        for (folder, mode) in [
            (&world.workspace, 0o755),
            (&world.out, 0o777),
            (&world.home, 0o755),
            (&world.state, 0o700),
            (&world.runtime, 0o700),
            (&world.temp, 0o700),
        ] {
            fs::create_dir(folder).expect("a folder can be made");
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).expect("our own folder");
            world.own(folder);
        }
        for name in ["s", "s2"] {
            fs::write(world.out.join(name), SENTINEL).expect("a file can be made");
            fs::set_permissions(world.out.join(name), fs::Permissions::from_mode(0o666)).expect("our own file");
            world.own(&world.out.join(name));
        }
        fs::write(world.home.join("private"), SENTINEL).expect("a file can be made");
        world.own(&world.home.join("private"));
        world
    }

    /// The folder that holds all the others.
    pub fn base(&self) -> &Path {
        self.workspace.parent().expect("made with a parent")
    }

    /// The user and group that Tollgate runs as here.
    pub fn ids(&self) -> (u32, u32) {
        match self.way.identity {
            Identity::Root => (0, 0),
            Identity::Ordinary if geteuid().is_root() => (ORDINARY_UID, ORDINARY_UID),
            Identity::Ordinary => (geteuid().as_raw(), nix::unistd::getegid().as_raw()),
        }
    }

    /// Gives a path to the world's user.
    pub fn own(&self, path: &Path) {
        let (uid, gid) = self.ids();
        if geteuid().is_root() {
            nix::unistd::fchownat(
                nix::fcntl::AT_FDCWD,
                path,
                Some(Uid::from_raw(uid)),
                Some(Gid::from_raw(gid)),
                nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW,
            )
            .expect("the superuser may give files away");
        }
    }

    /// Writes a file of the workspace, with its folders, owned by the world's user.
    pub fn write(&self, relative: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.workspace.join(relative);
        let mut made = Vec::new();
        let mut folder = path.parent().expect("below the workspace").to_path_buf();
        while !folder.exists() {
            made.push(folder.clone());
            folder = folder.parent().expect("ends at the workspace").to_path_buf();
        }
        for folder in made.iter().rev() {
            fs::create_dir(folder).expect("a folder can be made");
            self.own(folder);
        }
        fs::write(&path, content).expect("a file can be made");
        self.own(&path);
        path
    }

    /// Sets the permission bits of a workspace file.
    pub fn mode(&self, relative: &str, mode: u32) {
        fs::set_permissions(self.workspace.join(relative), fs::Permissions::from_mode(mode))
            .expect("the file is there");
    }

    /// A file of the workspace as text.
    pub fn read(&self, relative: &str) -> String {
        let path = self.workspace.join(relative);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Puts a Python probe into the workspace and returns its path there.
    pub fn python(&self, probe: &str) -> String {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("probes").join(probe);
        let path = self.write(probe, fs::read(&source).unwrap_or_else(|error| panic!("{}: {error}", source.display())));
        path.into_os_string().into_string().expect("temporary paths are UTF-8")
    }

    /// Compiles a C probe into the workspace and returns its path there.
    pub fn compiled(&self, probe: &str) -> String {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("probes").join(probe);
        let path = self.workspace.join(probe.trim_end_matches(".c"));
        let output = Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-static", "-pthread", "-o"])
            .arg(&path)
            .arg(&source)
            .output()
            .expect("building Rust needs `cc`, so it is here");
        assert!(output.status.success(), "{}: {}", source.display(), String::from_utf8_lossy(&output.stderr));
        self.own(&path);
        path.into_os_string().into_string().expect("temporary paths are UTF-8")
    }

    /// `tollgate run --launcher L …`.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Invocation {
        let launcher = match self.way.launcher {
            Launcher::Native => "native",
            Launcher::Bwrap => "bwrap",
        };
        let mut all: Vec<OsString> = ["run", "--launcher", launcher].map(OsString::from).to_vec();
        all.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self.tollgate(all)
    }

    /// `tollgate run … -- sh -c SCRIPT`.
    pub fn run_script(&self, script: &str) -> Invocation {
        self.run(["--", "sh", "-c", script])
    }

    /// `tollgate …`.
    pub fn tollgate<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Invocation {
        let mut invocation = self.command(binaries().join("tollgate"));
        invocation.command.args(arguments);
        invocation
    }

    /// A shell of the world's user on the host. `$TG` is `tollgate run` over the world's launcher, `$OUT` the outside
    /// folder, and `tollgate` is on the path.
    pub fn shell(&self, script: &str) -> Invocation {
        let launcher = match self.way.launcher {
            Launcher::Native => "native",
            Launcher::Bwrap => "bwrap",
        };
        let mut invocation = self.command("/bin/bash");
        invocation.command.args(["-c", script]);
        invocation.command.env("TG", format!("tollgate run --launcher {launcher}"));
        invocation.command.env("OUT", &self.out);
        invocation
    }

    /// Any program of the world's user, on the host.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Invocation {
        let mut command = Command::new(program);
        command.current_dir(&self.workspace);
        command.env_clear();
        command.envs(self.environment());
        let (uid, gid) = self.ids();
        if geteuid().is_root() && uid != 0 {
            // The standard library drops the supplementary groups too when it changes the user.
            command.uid(uid).gid(gid);
        }
        Invocation { command, input: Vec::new(), timeout: DEFAULT_TIMEOUT * slowness() }
    }

    /// The environment of every command of this world; nothing else is inherited.
    pub fn environment(&self) -> BTreeMap<&'static str, OsString> {
        let mut path = binaries().as_os_str().to_owned();
        path.push(":");
        path.push(PATH);
        BTreeMap::from([
            ("PATH", path),
            ("HOME", self.home.clone().into()),
            ("TOLLGATE_STATE", self.state.clone().into()),
            ("XDG_RUNTIME_DIR", self.runtime.clone().into()),
            ("TMPDIR", self.temp.clone().into()),
            ("LANG", "C.UTF-8".into()),
            ("GIT_CONFIG_NOSYSTEM", "1".into()),
        ])
    }

    /// Every run of this world, oldest first.
    pub fn runs(&self) -> Vec<Value> {
        let output = self.tollgate(["ps", "--all", "--json"]).finish();
        assert_eq!(output.status, 0, "`ps --all --json` failed: {output}");
        let mut runs = output.json_lines();
        runs.sort_by_key(|run| run["started_at"].as_str().unwrap_or_default().to_owned());
        runs
    }

    /// The latest run.
    pub fn last_run(&self) -> Value {
        self.runs().pop().expect("a run was recorded")
    }

    /// The receipts of the latest run, with these further flags of `tollgate receipts`.
    pub fn receipts(&self, flags: &[&str]) -> Vec<Value> {
        let id = self.last_run()["id"].as_str().expect("a run has an id").to_owned();
        self.receipts_of(&id, flags)
    }

    /// The receipts of one run.
    pub fn receipts_of(&self, run: &str, flags: &[&str]) -> Vec<Value> {
        let mut arguments = vec!["receipts", run, "--json"];
        arguments.extend(flags);
        let output = self.tollgate(arguments).finish();
        assert_eq!(output.status, 0, "`receipts` failed: {output}");
        output.json_lines()
    }

    /// A snapshot of the workspace.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.workspace)
    }

    /// Fails if a byte of the outside folder or of the caller's home changed.
    #[track_caller]
    pub fn assert_outside_intact(&self) {
        for (path, names) in [(&self.out, vec!["s", "s2"]), (&self.home, vec!["private"])] {
            let mut found: Vec<String> = fs::read_dir(path)
                .expect("the outside folder is there")
                .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
                .collect();
            found.sort();
            assert_eq!(found, names, "{} has other files than before", path.display());
            for name in names {
                assert_eq!(fs::read_to_string(path.join(name)).expect("a sentinel is there"), SENTINEL);
            }
        }
    }

    /// Processes on the host that belong to this world.
    pub fn processes(&self) -> Vec<observe::Process> {
        observe::processes_naming(&self.base().to_string_lossy())
    }

    /// Fails unless, within this time, no process, mount, control group or temporary file of this world's runs is left.
    #[track_caller]
    pub fn assert_nothing_left(&self, within: Duration) {
        let deadline = Instant::now() + within;
        loop {
            let left = self.left_over();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left over after {within:?}:\n{}", left.join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn left_over(&self) -> Vec<String> {
        let mut left: Vec<String> = self.processes().iter().map(|process| format!("process {process:?}")).collect();
        let base = self.base().to_string_lossy().into_owned();
        left.extend(
            observe::mounts().into_iter().filter(|mount| mount.contains(&base)).map(|mount| format!("mount {mount}")),
        );
        left.extend(
            observe::control_groups("tollgate")
                .into_iter()
                .filter(|group| self.is_ours(group))
                .map(|group| format!("cgroup {group}")),
        );
        for folder in [&self.temp, &self.runtime] {
            for entry in fs::read_dir(folder).expect("our own folder").flatten() {
                left.push(format!("temporary file {}", entry.path().display()));
            }
        }
        left
    }

    // Control groups carry the run's id in their name; the ledger says which runs are ours.
    fn is_ours(&self, group: &str) -> bool {
        let output = self.tollgate(["ps", "--all", "--json"]).finish();
        output.json_lines().iter().filter_map(|run| run["id"].as_str()).any(|id| group.contains(id))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::env::var_os("TOLLGATE_TEST_KEEP").is_some() {
            // Leaked on purpose, for looking at afterwards.
            eprintln!("kept: {}", self.base().display());
            self.base.disable_cleanup(true);
            self.apart.disable_cleanup(true);
            return;
        }
        for process in self.processes() {
            // Whatever a failed test left behind must not disturb the next one.
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
        }
        // A test may have left folders without write permission; the temporary folder's own removal needs it.
        observe::make_removable(self.base());
    }
}

/// A command that is about to be run.
pub struct Invocation {
    command: Command,
    input: Vec<u8>,
    timeout: Duration,
}

impl Invocation {
    /// Sets a variable.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Invocation {
        self.command.env(name, value);
        self
    }

    /// Removes a variable.
    pub fn env_remove(mut self, name: &str) -> Invocation {
        self.command.env_remove(name);
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Invocation {
        self.command.arg(argument);
        self
    }

    /// Runs it elsewhere than in the workspace.
    pub fn within(mut self, folder: &Path) -> Invocation {
        self.command.current_dir(folder);
        self
    }

    /// What its standard input holds; empty unless set.
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Invocation {
        self.input = bytes.into();
        self
    }

    /// How long it may take.
    pub fn timeout(mut self, timeout: Duration) -> Invocation {
        self.timeout = timeout * slowness();
        self
    }

    /// The bare command, for tests that wire its descriptors themselves.
    pub fn into_command(self) -> Command {
        self.command
    }

    /// Runs it to its end.
    #[track_caller]
    pub fn finish(self) -> Finished {
        self.start().wait()
    }

    /// Starts it.
    #[track_caller]
    pub fn start(mut self) -> Started {
        let line = format!("{:?}", self.command);
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().unwrap_or_else(|error| panic!("{line}: {error}"));
        let mut stdin = child.stdin.take().expect("piped above");
        let input = self.input;
        // On its own thread: a program that reads nothing must not block the test. A broken pipe is the program's right.
        std::thread::spawn(move || {
            let _ = stdin.write_all(&input);
        });
        let stdout = drain(child.stdout.take().expect("piped above"));
        let stderr = drain(child.stderr.take().expect("piped above"));
        Started { child, stdout, stderr, line, started: Instant::now(), timeout: self.timeout }
    }
}

fn drain(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// A command that runs.
pub struct Started {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<Vec<u8>>,
    line: String,
    started: Instant,
    timeout: Duration,
}

impl Started {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id().try_into().expect("process ids fit")
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the child is ours and not yet waited for");
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the child is ours").is_none()
    }

    /// Waits for its end; kills it and fails when it takes too long, or when something holds its output open.
    #[track_caller]
    pub fn wait(mut self) -> Finished {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child is ours") {
                break status;
            }
            if self.started.elapsed() > self.timeout {
                let _ = self.child.kill();
                let _ = self.child.wait();
                let (stdout, stderr) = (harvest(self.stdout), harvest(self.stderr));
                panic!("{} took longer than {:?}\n{stdout:?}\n{stderr:?}", self.line, self.timeout);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let elapsed = self.started.elapsed();
        let deadline = Instant::now() + Duration::from_secs(5);
        while !(self.stdout.is_finished() && self.stderr.is_finished()) {
            assert!(Instant::now() < deadline, "{} ended, but something holds its output open", self.line);
            std::thread::sleep(Duration::from_millis(2));
        }
        Finished {
            status: shell_status(status),
            stdout: self.stdout.join().expect("the reader does not panic"),
            stderr: self.stderr.join().expect("the reader does not panic"),
            elapsed,
        }
    }
}

fn harvest(reader: JoinHandle<Vec<u8>>) -> Option<String> {
    std::thread::sleep(Duration::from_millis(100));
    reader.is_finished().then(|| String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned())
}

/// An exit status as a shell shows it.
pub fn shell_status(status: ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).expect("an ended process exited or was signaled")
}

/// A command that ended.
pub struct Finished {
    /// Its exit status as a shell shows it: 128+n for a signal.
    pub status: i32,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it printed on standard error.
    pub stderr: Vec<u8>,
    /// How long it took.
    pub elapsed: Duration,
}

impl Finished {
    /// Standard output as text.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard error as text.
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Fails unless it ended with this status.
    #[track_caller]
    pub fn expect_status(self, status: i32) -> Finished {
        assert_eq!(self.status, status, "{self}");
        self
    }

    /// Standard output, one JSON value a line.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        self.out()
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("not JSON ({error}): {line}\n{self}")))
            .collect()
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short =
            |text: String| if text.len() > 6000 { text.chars().take(6000).collect::<String>() + "…" } else { text };
        writeln!(f, "status {} after {:?}", self.status, self.elapsed)?;
        writeln!(f, "--- stdout\n{}\n--- stderr\n{}", short(self.out()), short(self.err()))
    }
}

/// Changes the owner of a path.
pub fn give(path: &Path, uid: u32) {
    chown(path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid))).expect("the superuser may give files away");
}
