//! What comes before the jail: what can be refused early, the plan, the store, the doors.
use super::super::{denials, files::LateFiles};
use crate::{
    chain::{Chain, World},
    doors::{self, api, control, program},
    jail::{
        enforcer::Enforcer,
        launch::{self},
        profile,
        seccomp::{self, WatchLevel},
        spec::{self, Bind, Inputs, Presence, Privilege, Store},
    },
    ledger::record::{ChangesState, RunRecord},
    policy::{self, search, secret::SecretSource, Policy, WorkspaceAccess},
    room::{
        batch, mirror,
        place::{Place, View},
        tree,
    },
    world::fs::{Identity, WorkspaceFiles},
};
use nix::sys::signal::Signal;
use std::{
    ffi::OsString,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};
use tollgate_shim::protocol::{Launcher, Layer, Mount, Terminal};

use super::execute::Run;
use super::{network::Network, Copy};

impl Run<'_> {
    /// What can be refused before anything is built.
    pub(super) fn check(&self) -> Result<(), String> {
        let first = self.request.command.first().ok_or("there is no command; write it after `--`")?;
        let commands = &self.request.policy.jail.commands;
        if !commands.admit(first) {
            let policy::Commands::List(names) = commands else { return Ok(()) };
            return Err(format!(
                "the policy `{}` starts only {}, not `{}`; choose another policy, or add it to `[jail] commands`",
                self.request.policy.name,
                names.join(", "),
                first.to_string_lossy()
            ));
        }
        let state = self.ledger.state().canonicalize().unwrap_or_else(|_| self.ledger.state().to_owned());
        if self.request.workspace.starts_with(&state) {
            return Err(format!("{} is Tollgate's own: no run may see it", self.request.workspace.display()));
        }
        let views = self.request.policy.jail.views.iter().filter_map(|view| view.path.canonicalize().ok());
        for view in views.chain(self.shared_git().map(Path::to_owned)) {
            // Files are made in these: a read-only view over them would leave no room.
            if ["/etc", "/run", "/home", "/var", "/tmp"].iter().any(|made| view == Path::new(made)) {
                return Err(format!(
                    "{} is made for each run and cannot be shown whole; name the files or folders in it that the \
                     program needs, each with a `--view`",
                    view.display()
                ));
            }
            if view.starts_with(&state) || state.starts_with(&view) {
                return Err(format!(
                    "{} holds or is Tollgate's own {}: no run may see it; name a narrower `--view`",
                    view.display(),
                    state.display()
                ));
            }
        }
        spec::check_workspace(&self.request.workspace).map_err(|error| error.to_string())
    }

    pub(super) fn store(&self) -> Store {
        match (self.request.policy.jail.workspace, self.request.copy) {
            (WorkspaceAccess::ReadWrite, Copy::Overlay) => Store::Overlay,
            (WorkspaceAccess::ReadWrite, Copy::Mirror) => Store::Mirror,
            (WorkspaceAccess::ReadOnly, _) => Store::ReadOnly,
            (WorkspaceAccess::Hidden, _) => Store::Hidden,
        }
    }

    /// The host user that owns what the jail writes, where that is not the caller.
    pub(super) fn own_ids(&self) -> Option<(u32, u32)> {
        let own = spec::run_uid(&self.id);
        (self.request.caller.privilege == Privilege::Root).then_some((own, own))
    }

    /// A copy takes time and space before the program starts; an overlay takes neither.
    pub(super) fn prepare_store(&self, store: Store) -> Result<(), String> {
        let view = match store {
            Store::Overlay => View::Overlay,
            Store::Mirror => View::Mirror,
            Store::ReadOnly | Store::Hidden => return Ok(()),
        };
        let open = |path: &Path| tree::open_root(path).map_err(|error| format!("{}: {error}", path.display()));
        let folder = open(&self.folder.path)?;
        let shift = self.own_ids().map(|own| batch::IdShift { from: own, to: self.owner() });
        let write_down = || {
            let created = Place::create(&folder, &self.id, &self.request.workspace, self.since_ns, shift, view);
            created.map(|_| ()).map_err(|error| error.to_string())
        };
        if let Some(resumption) = self.request.resumes.as_ref().filter(|resumption| resumption.since_ns.is_some()) {
            // First, so that whoever finds this run interrupted knows what the layer is to.
            write_down()?;
            resumption.take_over(&self.folder.path, store, self.own_ids())?;
            let taken = self.ledger.run(&resumption.run.0).map_err(|error| error.to_string())?;
            let taken = RunRecord { changes: ChangesState::Resumed, ..taken };
            return self.ledger.update_run(&taken).map_err(|error| error.to_string());
        }
        // Before it is written down: until the copy is whole, a crash leaves a run that changed nothing.
        if view == View::Mirror {
            let workspace = open(&self.request.workspace)?;
            mirror::create(&workspace, &folder, mirror::DEFAULT_MAX_BYTES, self.own_ids())
                .map_err(|error| error.to_string())?;
        }
        write_down()
    }

    /// Whose the workspace is on the host.
    pub(super) fn owner(&self) -> (u32, u32) {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(&self.request.workspace).map(|found| (found.uid(), found.gid())).unwrap_or((0, 0))
    }

    pub(super) fn plan(
        &self,
        enforcer: &Enforcer,
        store: Store,
        terminal: Option<Terminal>,
        shim: &Path,
        network: Option<&Network>,
    ) -> Result<tollgate_shim::protocol::Plan, String> {
        let policy = &self.request.policy;
        let variable = |wanted: &str| {
            let found = self.request.environment.iter().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let list = search::seccomp_list(&policy.jail.seccomp)
            .ok_or_else(|| format!("there is no list of system calls named `{}`", policy.jail.seccomp))?;
        let compiled = seccomp::compile(list, WatchLevel::Everything).map_err(|error| error.to_string())?;
        let profile = profile::text(policy.jail.profile.as_str()).map_err(|error| error.to_string())?;
        let path = variable("PATH");
        let launcher = match policy.jail.launcher {
            policy::Launcher::Native => Launcher::Native,
            policy::Launcher::Bwrap => Launcher::Bwrap {
                program: launch::find_bwrap(&path)
                    .ok_or("`bwrap` is not on the PATH; install bubblewrap, or use `--launcher native`")?
                    .into(),
            },
        };
        let rule = &policy.jail.environment;
        let everything = self.request.without.contains(&Layer::Environment);
        let mut environment: Vec<(OsString, OsString)> = self
            .request
            .environment
            .iter()
            .filter(|(name, _)| everything || name.to_str().is_some_and(|name| rule.passes(name)))
            .cloned()
            .collect();
        for (name, value) in &rule.fixed {
            environment.retain(|(known, _)| known.to_str() != Some(name));
            environment.push((name.into(), value.into()));
        }
        // The variable that a value comes from holds it, whatever the policy passes.
        for secret in &policy.network.secrets {
            let source = secret_variable(&secret.from);
            environment.retain(|(known, _)| known.to_str() != Some(&secret.name) && known.to_str() != source);
        }
        for (name, placeholder) in network.into_iter().flat_map(Network::placeholders) {
            environment.push((name.into(), placeholder.into()));
        }
        let mut views: Vec<Bind> = policy.jail.views.iter().map(view).collect();
        if let Some(common) =
            self.shared_git().filter(|common| !views.iter().any(|view| common.starts_with(&view.target)))
        {
            let (source, target) = (common.to_owned(), common.to_owned());
            let access = tollgate_shim::protocol::Access::ReadOnly;
            views.push(Bind { source, target, access, presence: Presence::Required });
            // It cannot be written, so git need not try to refresh its index each time it looks (git(1)).
            environment.push(("GIT_OPTIONAL_LOCKS".into(), "0".into()));
        }
        let inputs = Inputs {
            run: self.id.clone(),
            profile,
            views,
            workspace: self.request.workspace.clone(),
            store,
            hidden: hidden(policy, &self.request.workspace)?,
            directory: self.request.directory.clone(),
            command: self.request.command.clone(),
            environment,
            path,
            run_dir: self.folder.path.clone(),
            state_dir: self.ledger.state().to_owned(),
            shim: shim.to_owned(),
            caller: self.request.caller.clone(),
            rlimits: enforcer.rlimits(),
            terminal,
            filters: compiled.filters,
            observed: compiled.observed,
            enforcement: policy.jail.enforcement,
            launcher,
            without: self.request.without.clone(),
            network: network.map(Network::plan),
        };
        let mut plan = spec::plan(inputs).map_err(|error| error.to_string())?;
        plan.watch.asked = self.request.answering.asked();
        Ok(plan)
    }

    pub(super) fn open_doors(
        &self,
        chain: &Arc<Chain>,
        plan: &tollgate_shim::protocol::Plan,
        files: LateFiles,
        calls: Arc<denials::Context>,
    ) -> io::Result<Doors> {
        let broker = doors::http::listen_at(&self.folder.path.join("door"), "broker.sock", 0o600)?;
        if self.request.caller.privilege == Privilege::Root {
            let own = Some(plan.ids.host_uid);
            std::os::unix::fs::chown(self.folder.path.join("door/broker.sock"), own, own)?;
        }
        let control = doors::http::listen_at(&self.folder.path, control::SOCKET, 0o600)?;
        let knocked = [OwnedFd::from(broker.try_clone()?), OwnedFd::from(control.try_clone()?)];
        let insight =
            super::super::insight::RunInsight::new(&self.id, &self.request.policy, chain, plan, self.live.clone());
        let contents = doors::content::Contents::open(self.folder.path.join("contents"));
        let context = Arc::new(api::ApiContext {
            chain: chain.clone(),
            world: self.world(&files),
            subject: self.subject.clone(),
            room: None,
            place: doors::request::Place {
                run: self.id.clone(),
                workspace: std::os::unix::ffi::OsStrExt::as_bytes(self.request.workspace.as_os_str()).to_vec(),
            },
            contents: contents.clone(),
            insight: Arc::new(insight),
            refusals: Arc::new(api::LedgerRefusals::new(self.ledger.clone(), self.id.clone())),
        });
        let (close, closed) = tokio::sync::watch::channel(false);
        let (for_api, for_control, for_calls) = (closed.clone(), closed.clone(), closed);
        let (questions, asked) = tokio::sync::mpsc::unbounded_channel();
        let chain = chain.clone();
        let live: Arc<dyn control::Controlled> = self.live.clone();
        let until = |mut closed: tokio::sync::watch::Receiver<bool>| async move {
            // The sender going away means the same.
            let _ = closed.wait_for(|closed| *closed).await;
        };
        let event_loop = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        let serve_control = move || -> io::Result<()> {
            event_loop()?.block_on(async move {
                let control = tokio::net::UnixListener::from_std(control)?;
                control::serve(control, live, until(for_control)).await;
                Ok(())
            })
        };
        let serve = move || -> io::Result<()> {
            // Small effects are done on the thread of the door that they come by. Whoever ends the run must not wait for
            // them, on however slow a file system.
            let controlling = thread::Builder::new().name("control".to_owned()).spawn(serve_control)?;
            let served = event_loop()?.block_on(async move {
                let broker = tokio::net::UnixListener::from_std(broker)?;
                tokio::join!(
                    api::serve(broker, context, until(for_api)),
                    program::serve(asked, chain, calls, for_calls)
                );
                Ok(())
            });
            let controlled =
                controlling.join().unwrap_or_else(|_| Err(io::Error::other("the control socket's thread died")));
            served.and(controlled)
        };
        let opening = Arc::new(Opening(Mutex::new(Serving::Later(Box::new(serve)))));
        // Calls of the program are asked about through no socket.
        if !plan.watch.asked.is_empty() {
            opening.open()?;
        }
        let hidden = plan.mounts.iter().filter_map(|mount| match mount {
            Mount::Mask { target, .. } => {
                target.to_path().strip_prefix(&self.request.workspace).ok().map(Path::to_owned)
            }
            _ => None,
        });
        Ok(Doors { close, opening, knocked: Some(knocked), files, contents, hidden: hidden.collect(), questions })
    }

    pub(super) fn world(&self, files: &LateFiles) -> Arc<dyn World> {
        let live = self.live.clone();
        let cancel = move || control::Controlled::kill(&*live, Signal::SIGKILL);
        Arc::new(crate::world::runs::OwnRun::new(self.id.clone(), Arc::new(files.clone()), cancel))
    }

    /// Hands the finished view to the API door's world.
    pub(super) fn view_stands(&self, view: OwnedFd, doors: &Doors) {
        let identity = self.own_ids().map(|(uid, gid)| Identity { uid, gid });
        doors.files.arrive(WorkspaceFiles::new(view, doors.contents.clone(), identity), doors.hidden.clone());
    }
}

/// The variable of the caller's that a secret comes from.
fn secret_variable(from: &SecretSource) -> Option<&str> {
    match from {
        SecretSource::Env(name) => Some(name),
        SecretSource::Basic { password, .. } => secret_variable(password),
        SecretSource::File(_) | SecretSource::Credential(_) => None,
    }
}

fn view(view: &policy::View) -> Bind {
    Bind {
        source: view.path.clone(),
        target: view.path.clone(),
        access: tollgate_shim::protocol::Access::ReadOnly,
        presence: match view.presence {
            policy::Presence::Required => Presence::Required,
            policy::Presence::Optional => Presence::Optional,
        },
    }
}

/// What of the workspace a policy hides: every path that is there now and that one of its patterns matches. What the
/// program makes itself later holds nothing that it does not know.
pub(super) fn hidden(policy: &Policy, workspace: &Path) -> Result<Vec<PathBuf>, String> {
    const MOST: usize = 1_000;
    if policy.jail.hide.is_empty() {
        return Ok(Vec::new());
    }
    let mut patterns = globset::GlobSetBuilder::new();
    for text in &policy.jail.hide {
        let glob = globset::GlobBuilder::new(text).literal_separator(true).build();
        patterns.add(glob.map_err(|error| format!("the policy `{}` hides `{text}`: {error}", policy.name))?);
    }
    let patterns = patterns.build().map_err(|error| format!("the policy `{}`: {error}", policy.name))?;
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(directory) = pending.pop() {
        let here = workspace.join(&directory);
        let entries = match std::fs::read_dir(&here) {
            Ok(entries) => entries,
            // The program cannot look into it either.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
            Err(error) => return Err(format!("{}: {error}", here.display())),
        };
        for entry in entries {
            let entry = entry.map_err(|error| format!("{}: {error}", here.display()))?;
            let path = directory.join(entry.file_name());
            let kind = entry.file_type().map_err(|error| format!("{}: {error}", entry.path().display()))?;
            if patterns.is_match(&path) {
                found.push(path);
            } else if kind.is_dir() {
                pending.push(path);
            }
            if found.len() > MOST {
                return Err(format!(
                    "the policy `{}` hides more than {MOST} paths of this workspace; hide the folders that hold them",
                    policy.name
                ));
            }
        }
    }
    Ok(found)
}

/// The run's sockets and what serves them.
pub(super) struct Doors {
    pub(super) close: tokio::sync::watch::Sender<bool>,
    pub(super) opening: Arc<Opening>,
    /// What becomes readable when somebody connects for the first time.
    pub(super) knocked: Option<[OwnedFd; 2]>,
    pub(super) files: LateFiles,
    pub(super) contents: Arc<doors::content::Contents>,
    pub(super) hidden: Vec<PathBuf>,
    /// Where calls of the program that wait are asked about.
    pub(super) questions: tokio::sync::mpsc::UnboundedSender<program::Question>,
}

impl Doors {
    pub(super) fn close(self) {
        let _ = self.close.send(true);
        self.opening.close();
    }
}

/// The thread that serves the run's sockets, from when the first connects: most runs need none.
pub(super) struct Opening(Mutex<Serving>);

enum Serving {
    /// Nobody has connected.
    Later(Box<dyn FnOnce() -> io::Result<()> + Send>),
    /// It serves.
    Now(thread::JoinHandle<()>),
    /// The run is over, or there was no thread to be had.
    NoMore,
}

impl Opening {
    /// Serves from now on, if it does not yet.
    ///
    /// # Errors
    /// That no thread can be had. The sockets are closed then.
    pub(super) fn open(&self) -> io::Result<()> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, Serving::NoMore) {
            Serving::Later(serve) => {
                let serve = move || {
                    if let Err(error) = serve() {
                        tracing::error!(%error, "the run's sockets are not served");
                    }
                };
                *state = Serving::Now(thread::Builder::new().name("doors".to_owned()).spawn(serve)?);
            }
            other => *state = other,
        }
        Ok(())
    }

    fn close(&self) {
        let state = std::mem::replace(&mut *self.lock(), Serving::NoMore);
        if let Serving::Now(thread) = state {
            // A panic there has been reported already; the run goes on to its end.
            let _ = thread.join();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Serving> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
