//! From the plan to the end of the program and its jail.
use super::super::{block::block_on, denials, files::LateFiles, meanwhile::Deferred};
use crate::{
    chain::{
        admission::Admission,
        quota::Meters,
        stack::{Element, Stack, Wiring},
        Answer, BoxFuture, Chain, World,
    },
    crash::{self, Point},
    doors::{program::Question, published::Dialler},
    effect::{self, Class, Door, Effect, Kind, Request, Resource, RunId, Subject},
    jail::{
        cgroup::CgroupEnvironment,
        enforcer::{Enforcer, Exceeded},
        kernel,
        launch::{self, NetworkSockets, Shim, ShimListener, ShimSpeaker},
        outcome::{Backstops, Ended, Facts, NotStarted},
        probe,
        spec::Store,
        streams::{self, OutputMeter},
        worktree::Linked,
    },
    ledger::{
        query::Denied,
        record::{OutcomeType, Receipt, RunState, Usage},
        Draft, Ledger, ReceiptQuery,
    },
    policy::WorkspaceAccess,
};
use nix::{
    errno::Errno,
    poll::{poll, PollFd, PollFlags, PollTimeout},
    sys::{
        signal::Signal,
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::Pid,
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{mpsc, Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};
use tollgate_shim::protocol::{FromShim, Launcher, Layer, Terminal, ToShim, Way};

use super::{
    answering::{Handlers, INPUT},
    close::own,
    elements::elements,
    folder::Folder,
    handled,
    live::{Event, Live},
    network::{Network, NetworkDoor},
    prepare::{Doors, Opening},
    progress::Progress,
    publish::PublishedPorts,
    Refusal, RunError, RunRequest, Streams,
};

/// The steps whose failure lies in how the machine is set up.
const EXPLAINED_STEPS: [&str; 9] =
    ["user namespace", "namespaces", "id maps", "loopback", "network", "view", "views", "landlock", "seccomp"];
/// So many refusals by the jail's layers have a receipt of their own in one run; a program that makes more must not
/// fill the disk with them, and a note says how many there were.
const MAX_DENIALS: u64 = 10_000;
/// So many refusals of one run are explained at its end.
const MOST_REFUSALS: usize = 100;
/// How long a killed jail may take to be gone before it is killed once more.
const KILL_AGAIN: Duration = Duration::from_millis(100);

pub(super) struct Run<'a> {
    pub(super) ledger: &'a Ledger,
    pub(super) id: RunId,
    pub(super) subject: Subject,
    pub(super) folder: Folder,
    pub(super) live: Arc<Live>,
    pub(super) request: RunRequest,
    pub(super) handlers: Handlers,
    pub(super) refusals: Vec<Refusal>,
    pub(super) denials: u64,
    pub(super) since_ns: i64,
    /// Why a copy of the workspace serves instead of the overlay that was wanted.
    pub(super) copied: Option<String>,
    /// What the workspace leads to, if it is a linked git worktree.
    pub(super) linked: Option<Linked>,
    /// Signals that come when the program is over.
    pub(super) deferred: Arc<Deferred>,
}

/// A jail while it stands, with what serves it.
pub(super) struct Standing {
    pub(super) shim: Shim,
    pub(super) enforcer: Enforcer,
    /// The shim's process on the host.
    pub(super) outer: Pid,
    pub(super) doors: Doors,
    pub(super) context: Arc<denials::Context>,
    /// The network's door, if the run has a network.
    pub(super) network: NetworkDoor,
    /// The ports that it publishes.
    pub(super) published: PublishedPorts,
    /// What its effects pass.
    pub(super) chain: Arc<Chain>,
}

/// What is left when the program is over.
pub(super) struct Finished {
    pub(super) usage: Usage,
    pub(super) notes: Vec<String>,
    pub(super) chain: Option<Arc<Chain>>,
    pub(super) store: Store,
}

impl Finished {
    pub(super) fn nothing() -> Finished {
        Finished { usage: Usage::default(), notes: Vec::new(), chain: None, store: Store::ReadOnly }
    }
}

impl Run<'_> {
    /// Everything up to the end of the program and its jail.
    pub(super) fn execute(&mut self, streams: Streams) -> Result<(Facts, Finished), RunError> {
        crash::reach(Point::FolderMade);
        let refused = |reason: String| Ok((Facts::NotStarted(NotStarted::Refused(reason)), Finished::nothing()));
        if let Err(reason) = self.check() {
            return refused(reason);
        }
        let limits = &self.request.policy.limits;
        let enforcement = self.request.policy.jail.enforcement;
        let mut enforcer = match Enforcer::prepare(&self.id, limits, enforcement, &CgroupEnvironment::detect()) {
            Ok(enforcer) => enforcer,
            Err(limit) => return Ok((Facts::NotStarted(NotStarted::Limit(limit)), Finished::nothing())),
        };
        // It starts while the plan is made, and does nothing until it gets that.
        let shim_file = match launch::find_shim() {
            Ok(file) => file,
            Err(error) => return refused(error.to_string()),
        };
        let spawning = match Spawning::begin(&enforcer, &shim_file) {
            Ok(spawning) => spawning,
            Err(error) => return refused(format!("{}: {error}", shim_file.display())),
        };
        let store = self.store();
        if let Err(reason) = self.prepare_store(store) {
            return refused(reason);
        }
        match store {
            Store::Mirror => enforcer.measure_copy(self.folder.mirror()),
            Store::Overlay | Store::ReadOnly | Store::Hidden => {
                enforcer.measure_layer(self.folder.path.join("layer/upper"));
            }
        }
        let own_terminal = !self.request.without.contains(&Layer::Terminal);
        let terminal = terminal_of(&streams).filter(|_| own_terminal);
        let network = match Network::of(self) {
            Ok(network) => network,
            Err(reason) => return refused(reason),
        };
        let plan = match self.plan(&enforcer, store, terminal, &shim_file, network.as_ref()) {
            Ok(plan) => plan,
            Err(reason) => return refused(reason),
        };
        let plan_by_bwrap = plan.launcher != Launcher::Native;
        let mut passed: Vec<String> =
            plan.env.iter().map(|(name, _)| name.to_os().to_string_lossy().into_owned()).collect();
        passed.sort();
        self.live.change(|record| record.environment = passed);

        let files = LateFiles::default();
        let environment = self.live.change(|_| {}).environment;
        let prepared = Handlers::prepare(&self.request, &self.id, &self.folder.path, self.ledger, &environment, &files);
        self.handlers = match prepared {
            Ok(handlers) => handlers,
            Err(reason) => return refused(reason),
        };
        self.handlers.notes.extend(network.iter().flat_map(|network| network.absent.iter().cloned()));
        let owner = self.subject.uid;
        let wiring = Wiring { ledger: self.ledger, run: &self.id, owner, meters: &self.live.meters };
        let elements = elements(&self.id, &self.request, &self.handlers, &self.live.desk);
        let chain = match Stack(elements).build(&wiring) {
            Ok(chain) => Arc::new(chain),
            Err(error) => return refused(error.to_string()),
        };
        self.live.change(|record| record.chain = chain.names().into_iter().map(str::to_owned).collect());
        let (events, mut happened) = mpsc::channel();
        *self.live.events.lock().unwrap_or_else(PoisonError::into_inner) = Some(events.clone());

        let context = Arc::new(denials::Context {
            workspace: self.request.workspace.clone(),
            read_only: store == Store::ReadOnly,
            shared_git: self.shared_git().map(Path::to_owned),
            subject: self.subject.clone(),
            room: None,
            network: plan.network.is_some(),
        });
        let delivery = self.request.answering.delivery();
        let network = network
            .map_or_else(NetworkDoor::default, |network| network.door(&self.request, &self.subject, &chain, delivery));
        let published = match PublishedPorts::bind(&self.request.published) {
            Ok(published) => published,
            Err(reason) => return refused(reason),
        };
        let mut doors = self.open_doors(&chain, &plan, files, context.clone()).map_err(own("the run's sockets"))?;
        let mut pipes = streams::pipes(streams.on_terminal).map_err(own("pipes"))?;
        if !own_terminal {
            pipes.lead_to_the_caller(&streams.streams, streams.on_terminal).map_err(own("pipes"))?;
        }
        let mut shim = match spawning.finish() {
            Ok(shim) => shim,
            Err(error) => return refused(format!("{}: {error}", shim_file.display())),
        };
        crash::reach(Point::ShimSpawned);
        let outer = Pid::from_raw(shim.child.id() as i32);
        if let Err(limit) = enforcer.admit(outer) {
            shim.close();
            let _ = shim.child.wait();
            return Ok((Facts::NotStarted(NotStarted::Limit(limit)), Finished::nothing()));
        }
        {
            let [input, output, error] = &pipes.far;
            if let Err(error) = shim.begin(&plan, [input.as_fd(), output.as_fd(), error.as_fd()]) {
                reap(&mut shim, &enforcer);
                let said = shim.complaint().unwrap_or_else(|| error.to_string());
                let shim = shim_file.display();
                return refused(format!(
                    "{shim} ended before it had its plan: {said}; install it together with `tollgate`"
                ));
            }
        }
        drop(pipes.far);
        let ears = Ears {
            events: events.clone(),
            questions: doors.questions.clone(),
            deferred: self.deferred.clone(),
            doors: doors.opening.clone(),
            dialler: published.dialler(),
            knocked: doors.knocked.take(),
        };
        ears.listen(&shim).map_err(own("a thread"))?;

        let meter = OutputMeter::new(limits.output_bytes.value());
        let [input, output, error] = streams.streams;
        let mut progress = Progress {
            meter: meter.clone(),
            events: events.clone(),
            pumps: Vec::new(),
            caller: [Some(input), Some(output), Some(error)],
            on_terminal: streams.on_terminal,
            raw: None,
            master: None,
            ended: Ended::Unknown,
            failed: None,
            killed: None,
            asked: None,
            output_exceeded: false,
            built: false,
            executed: false,
            gone: false,
            input_copy: self.request.answering.records().then(|| self.folder.log(INPUT)).flatten(),
        };
        progress.start_pipes(pipes.input, pipes.outputs, &self.folder);
        self.live.change(|record| record.degraded = enforcer.degraded());
        let mut jail =
            Standing { shim, enforcer, outer, doors, context, network, published, chain: Arc::clone(&chain) };
        self.start(&mut happened, &mut progress, &mut jail);
        while !progress.gone {
            self.wait(&happened, &mut progress, &mut jail);
        }
        let Standing { mut shim, mut enforcer, doors, network, published, .. } = jail;
        // The program is over. Nothing of the jail may be left before anything else happens.
        reap(&mut shim, &enforcer);
        if !progress.executed && progress.failed.is_none() {
            let said = shim.complaint().unwrap_or_else(|| "it did not say why".to_owned());
            let who = if plan_by_bwrap { "bubblewrap" } else { "the shim" };
            progress.failed = Some(NotStarted::Refused(format!(
                "{who} ended before the jail was built: {said}; `tollgate doctor` tries each step by itself"
            )));
        }
        crash::reach(Point::ProgramEnded);
        enforcer.finish();
        self.live.stop_measuring(Usage { output_bytes: meter.printed(), ..enforcer.usage() });
        let exceeded = self.exceeded(&enforcer, &progress, &meter);
        progress.finish(exceeded.is_some() || progress.killed.is_some());
        *self.live.events.lock().unwrap_or_else(PoisonError::into_inner) = None;
        for event in happened.try_iter() {
            if let Event::Signal(signal) = event {
                self.deferred.keep(signal);
            }
        }
        // Nobody waits for the answer any more, and the doors would wait for whoever asked.
        self.live.desk.close();
        doors.close();
        network.close();
        published.close();

        let mut usage = enforcer.usage();
        usage.output_bytes = meter.printed();
        let mut notes = enforcer.notes();
        if self.denials > MAX_DENIALS {
            notes.push(format!(
                "the jail refused {} things; only the first {MAX_DENIALS} have a receipt each",
                self.denials
            ));
        }
        notes.extend(self.copied.clone());
        if let Some(Linked::Refused { named, reason }) = &self.linked {
            let named = denials::spelled(named);
            notes.push(format!("`.git` leads to {named}, which was not shown to the run: {reason}"));
        }
        let store = if self.copied.is_some() { Store::Mirror } else { store };
        let memory_kill = enforcer.memory_kill();
        let limits = &self.request.policy.limits;
        let backstops = Backstops {
            cpu: limits.cpu.value().map(|limit| (usage.cpu_us, limit.as_micros() as u64)),
            write: limits.write_bytes.value().map(|limit| (usage.write_bytes, limit)),
        };
        let facts = match progress.failed.take() {
            Some(failed) => Facts::NotStarted(failed),
            None => Facts::Ended {
                ended: progress.ended,
                exceeded,
                memory_kill,
                backstops,
                killed: progress.killed.map(|signal| signal as i32),
                not_applied: None,
            },
        };
        Ok((facts, Finished { usage, notes, chain: Some(chain), store }))
    }

    /// Handles what happens next.
    fn wait(&mut self, happened: &mpsc::Receiver<Event>, progress: &mut Progress, jail: &mut Standing) {
        match happened.recv() {
            Ok(Event::JailGone) | Err(mpsc::RecvError) => progress.gone = true,
            Ok(event) => self.handle(event, progress, jail),
        }
    }

    pub(super) fn handle(&mut self, event: Event, progress: &mut Progress, jail: &mut Standing) {
        match event {
            Event::Shim(FromShim::Network { way, told }, attached) => {
                let opened = NetworkSockets::adopt(way, told, attached).and_then(|sockets| jail.network.open(sockets));
                match opened {
                    Ok(()) => {}
                    Err(error) => {
                        progress.failed = Some(NotStarted::Refused(format!("the run's network: {error}")));
                        return jail.shim.close();
                    }
                }
                if way == Way::Ports {
                    let note = "network: this kernel cannot redirect connections, so only those to the ports that \
                                the policy names are taken";
                    self.live.change(|record| record.degraded.push(note.to_owned()));
                } else if !told {
                    let note = "network: this kernel does not tell of dropped datagrams, which have no receipt";
                    self.live.change(|record| record.degraded.push(note.to_owned()));
                }
            }
            Event::Shim(FromShim::Built { terminal, .. }, attached) => {
                crash::reach(Point::JailBuilt);
                if jail.context.network && !jail.network.is_open() {
                    // Never a run that believes in a network that nobody serves.
                    let reason = "the jail stands without the network that its policy gives; please report this";
                    progress.failed = Some(NotStarted::Refused(reason.to_owned()));
                    return jail.shim.close();
                }
                let mut attached = attached.into_iter();
                if let Some(workspace) = attached.next() {
                    self.view_stands(workspace, &jail.doors);
                }
                if let (true, Some(master)) = (terminal, attached.next()) {
                    if let Err(error) = progress.start_terminal(master, &self.folder) {
                        progress.failed = Some(NotStarted::Refused(format!("the caller's terminal: {error}")));
                        return jail.enforcer.kill();
                    }
                }
                progress.built = true;
            }
            Event::Shim(FromShim::Started { .. }, _) => {
                let record = self.live.change(|record| record.state = RunState::Running);
                // The record is for others to see; the program does not wait for it.
                self.ledger.update_run_unattended(&record);
                if let Err(error) = jail.published.open(&jail.chain, &self.subject, &jail.shim) {
                    tracing::error!(%error, "the published ports are not served");
                }
            }
            Event::Shim(FromShim::Degraded { layer, reason }, _) => {
                self.live.change(|record| record.degraded.push(format!("{layer}: {reason}")));
            }
            Event::Shim(FromShim::OverlayRefused { reason }, _) => self.copy_instead(&reason, progress, jail),
            Event::Shim(FromShim::StepFailed(mut failed), _) => {
                if failed.remedy.is_empty() && failed.errno != libc::ENOENT {
                    failed.remedy = match failed.step.as_str() {
                        "plan" => {
                            "`tollgate` and `tollgate-shim` are of different versions: install both together".into()
                        }
                        step if EXPLAINED_STEPS.contains(&step) => probe::explain(step, failed.errno),
                        _ => String::new(),
                    };
                }
                progress.failed = Some(NotStarted::Step(failed));
            }
            Event::Shim(FromShim::ExecFailed { errno, path }, _) => {
                self.explain_missing(errno);
                let path = denials::spelled(&path.to_path());
                progress.failed = Some(NotStarted::Exec { errno, path });
            }
            Event::Shim(FromShim::Denied(denied), _) => self.record_denied(&denied, &jail.context),
            Event::Shim(FromShim::Stopped { .. }, _) => progress.stop_with_the_program(&jail.shim),
            Event::Shim(FromShim::Exited { code, signal }, _) => {
                progress.ended = match (code, signal) {
                    (Some(code), _) => Ended::Exited(code),
                    (None, Some(signal)) => Ended::Signaled(signal),
                    (None, None) => Ended::Unknown,
                };
                progress.killed = progress.killed.or(progress.asked.filter(|asked| signal == Some(*asked as i32)));
            }
            Event::Signal(Signal::SIGWINCH) => progress.resize(),
            Event::Signal(signal) => {
                let _ = jail.shim.tell(&ToShim::Signal { number: signal as i32 });
            }
            Event::Kill(signal) => self.kill(signal, progress, jail),
            Event::TooMuchOutput => {
                progress.output_exceeded = true;
                jail.enforcer.kill();
            }
            // The listener passes these on by itself.
            Event::Shim(FromShim::Asked(_) | FromShim::Dialled { .. }, _) => {}
            Event::JailGone => {}
        }
    }

    /// Gives the run a copy of its workspace, because the kernel refused an overlay over it. The guarantee is the
    /// same, so this is no matter of enforcement; only the time and the space are not.
    fn copy_instead(&mut self, refused: &str, progress: &mut Progress, jail: &mut Standing) {
        if let Err(reason) = self.prepare_store(Store::Mirror) {
            let reason =
                format!("an overlay over the workspace is refused ({refused}), and so is a copy of it: {reason}");
            progress.failed = Some(NotStarted::Refused(reason));
            return jail.shim.close();
        }
        jail.enforcer.measure_copy(self.folder.mirror());
        let note = format!("overlay: {refused}; the run worked on a copy of the workspace instead");
        self.live.change(|record| record.degraded.push(note.clone()));
        self.copied = Some(note);
        if let Err(error) = jail.shim.tell(&ToShim::Copied) {
            tracing::debug!(%error, "the jail is gone already");
        }
    }

    /// What a linked git worktree shares with its repository, where that is shown.
    pub(super) fn shared_git(&self) -> Option<&Path> {
        let visible = self.request.policy.jail.workspace != WorkspaceAccess::Hidden;
        match &self.linked {
            Some(Linked::Shared(common)) if visible => Some(common),
            Some(Linked::Shared(_) | Linked::Refused { .. }) | None => None,
        }
    }

    /// The one moment at which something untrusted begins to run: an effect like any other.
    ///
    /// Its intent goes to the disk while the jail is being built, and its world waits for both.
    pub(super) fn start(&mut self, happened: &mut mpsc::Receiver<Event>, progress: &mut Progress, jail: &mut Standing) {
        let effect = Effect {
            kind: Kind::RunStart,
            resource: Resource::Run { id: self.id.0.clone() },
            subject: Subject { run: None, ..self.subject.clone() },
            room: None,
            door: Door::Control,
            request: Request::Run(effect::run::Request::Start {
                command: self.request.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
                policy: self.request.policy.name.clone(),
                policy_digest: self.request.policy.digest.to_string(),
                directory: self.request.directory.to_string_lossy().into_owned(),
                environment: self.live.change(|_| {}).environment,
            }),
        };
        let (ledger, run, owner) = (self.ledger, self.id.clone(), self.subject.uid);
        let answer = {
            let starting = Starting { run: &mut *self, happened, progress: &mut *progress, jail: &mut *jail };
            let world = StartWorld { starting: Mutex::new(Some(starting)) };
            let wiring = Wiring { ledger, run: &run, owner, meters: &Meters::default() };
            // The caller starts it, not the program: a policy's rules on `run/start` are about runs that a run starts,
            // and what this one may start with is its `commands`.
            let chain = Stack(vec![Element::Admission(Admission::everything())]).build(&wiring);
            match chain {
                Ok(chain) => block_on(chain.perform(&effect, &world)),
                Err(error) => Answer::refused("admission", error.to_string(), ""),
            }
        };
        if answer.is_success() {
            progress.executed = true;
            if let Some(gauge) = jail.enforcer.gauge() {
                let printed = progress.meter.clone();
                self.live.measure_with(move || Usage { output_bytes: printed.printed(), ..gauge.usage() });
            }
            return;
        }
        // Why the jail does not stand is known already, or found when it is gone.
        if progress.failed.is_none() && !progress.gone {
            let reason = match answer.hint.is_empty() {
                true => answer.reason.clone(),
                false => format!("{}; {}", answer.reason, answer.hint),
            };
            progress.failed = Some(NotStarted::Refused(format!("{}: {reason}", answer.decided_by)));
            self.remember(&effect, &answer);
        }
        jail.shim.close();
    }

    /// Waits until the jail stands, and says in words why it does not.
    fn wait_for_jail(
        &mut self,
        happened: &mpsc::Receiver<Event>,
        progress: &mut Progress,
        jail: &mut Standing,
    ) -> Result<(), String> {
        loop {
            match &progress.failed {
                Some(NotStarted::Step(failed)) => return Err(failed.to_string()),
                Some(NotStarted::Limit(refused)) => return Err(refused.to_string()),
                Some(NotStarted::Refused(reason)) => return Err(reason.clone()),
                Some(NotStarted::Exec { path, .. }) => return Err(format!("{path} cannot be executed")),
                None if progress.gone => return Err("the jail ended before it stood".to_owned()),
                None if progress.built => return Ok(()),
                None => self.wait(happened, progress, jail),
            }
        }
    }

    pub(super) fn kill(&mut self, signal: Signal, progress: &mut Progress, jail: &Standing) {
        let effect = Effect {
            kind: Kind::RunCancel,
            resource: Resource::Run { id: self.id.0.clone() },
            subject: Subject { run: None, ..self.subject.clone() },
            room: None,
            door: Door::Control,
            request: Request::Run(effect::run::Request::Cancel { run: self.id.0.clone() }),
        };
        let draft = Draft::now(&self.id, &effect, &Answer::done(serde_json::Value::Null, 0), &**self.ledger.clock());
        if let Err(error) = self.ledger.append(draft) {
            // Ending a run is never refused: a full disk must not keep anything alive.
            tracing::error!(%error, "the kill has no receipt");
        }
        progress.asked = Some(signal);
        if signal == Signal::SIGKILL {
            progress.killed = Some(signal);
            jail.enforcer.kill();
            jail.shim.close();
        } else {
            let _ = jail.shim.tell(&ToShim::Signal { number: signal as i32 });
        }
    }

    pub(super) fn record_denied(&mut self, denied: &tollgate_shim::protocol::Denied, context: &denials::Context) {
        let Some((effect, answer)) = denials::judge(denied, context) else { return };
        self.denials += 1;
        if self.denials > MAX_DENIALS {
            return;
        }
        if let Some(preflight) = &self.request.preflight {
            preflight.note_refused(&effect, &answer);
        }
        let draft = Draft::now(&self.id, &effect, &answer, &**self.ledger.clock()).repeated(denied.times);
        if let Err(error) = self.ledger.append(draft) {
            tracing::error!(%error, "a refusal has no receipt");
        }
        self.remember(&effect, &answer);
    }

    pub(super) fn remember(&mut self, effect: &Effect, answer: &Answer) {
        let refusal = Refusal {
            kind: effect.kind,
            object: effect.resource.to_string(),
            by: answer.decided_by.to_owned(),
            reason: answer.reason.clone(),
            hint: answer.hint.clone(),
        };
        if self.refusals.len() < MOST_REFUSALS && !self.refusals.contains(&refusal) {
            self.refusals.push(refusal);
        }
    }

    /// What was refused at the network door, the first of each, from its receipts.
    pub(super) fn remember_refused_hosts(&mut self) -> Result<(), crate::ledger::Error> {
        let query = ReceiptQuery {
            run: Some(self.id.clone()),
            class: Some(Class::Network),
            denied_only: Denied::Only,
            ..ReceiptQuery::default()
        };
        let refused: Vec<Receipt> = self.ledger.receipts(&query)?.take(MOST_REFUSALS).collect::<Result<_, _>>()?;
        for receipt in refused.into_iter().filter(|receipt| receipt.door == Door::Network) {
            let refusal = Refusal {
                kind: receipt.kind,
                object: receipt.resource.to_string(),
                by: receipt.decided_by,
                reason: receipt.reason,
                hint: receipt.hint,
            };
            if self.refusals.len() < MOST_REFUSALS && !self.refusals.contains(&refusal) {
                self.refusals.push(refusal);
            }
        }
        Ok(())
    }

    /// A program that the caller's own PATH leads to and the view does not show: says which view it needs.
    pub(super) fn explain_missing(&mut self, errno: i32) {
        let Some(program) = self.request.command.first() else { return };
        let path = self.request.environment.iter().find(|(name, _)| name == "PATH").map(|(_, value)| value);
        let Some(found) = denials::on_host(program, path, &self.request.workspace) else { return };
        if errno != libc::ENOENT {
            return;
        }
        let needs: Vec<String> = denials::views_for_program(&found)
            .iter()
            .map(|view| format!("--view {}", denials::spelled(view)))
            .collect();
        if needs.is_empty() {
            return;
        }
        let home = self.request.environment.iter().find(|(name, _)| name == "HOME");
        let home = home.map(|(_, value)| Path::new(value)).filter(|home| home.is_absolute());
        let ready = denials::policy_for_program(&found, home).filter(|(name, _)| *name != self.request.policy.name);
        let hint = match ready {
            Some((policy, None)) => {
                format!("the policy `{policy}` is made for it and shows what it needs: `--policy {policy}`")
            }
            Some((policy, Some(real))) => format!(
                "the policy `{policy}` shows it under its own name: `--policy {policy}`, and start {}",
                denials::spelled(&real)
            ),
            None => format!("show it, read-only, with `{}`", needs.join(" ")),
        };
        let refusal = Refusal {
            kind: Kind::ProcessExec,
            object: denials::spelled(&found),
            by: "view".to_owned(),
            reason: "the program, or what interprets it, is outside what the run's view shows".to_owned(),
            hint,
        };
        if !self.refusals.iter().any(|known| known.object == refusal.object) {
            self.refusals.insert(0, refusal);
        }
    }

    pub(super) fn exceeded(&self, enforcer: &Enforcer, progress: &Progress, meter: &OutputMeter) -> Option<Exceeded> {
        let output = progress.output_exceeded.then(|| Exceeded {
            kind: OutcomeType::OutputExceeded,
            used: meter.printed(),
            limit: self.request.policy.limits.output_bytes.value().unwrap_or(u64::MAX),
        });
        output.or_else(|| enforcer.exceeded())
    }
}

/// The world of `run/start`: waits for the jail, and lets it execute its program.
struct StartWorld<'a, 'r> {
    starting: Mutex<Option<Starting<'a, 'r>>>,
}

/// What starting takes.
struct Starting<'a, 'r> {
    run: &'a mut Run<'r>,
    happened: &'a mut mpsc::Receiver<Event>,
    progress: &'a mut Progress,
    jail: &'a mut Standing,
}

impl World for StartWorld<'_, '_> {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (Some(Starting { run, happened, progress, jail }), Kind::RunStart) = (starting, effect.kind) else {
                return Answer::failed("the run was started already", "report this: it is a bug of Tollgate's");
            };
            if let Err(reason) = run.wait_for_jail(happened, progress, jail) {
                return Answer::failed(format!("nothing was executed: {reason}"), "");
            }
            if let Err(error) = jail.enforcer.start_watch(jail.outer) {
                return Answer::failed(format!("nobody could watch the run's limits: {error}"), "free some threads");
            }
            match jail.shim.tell(&ToShim::Execute) {
                Ok(()) => Answer::done(serde_json::Value::Null, 0),
                Err(error) => Answer::failed(format!("the jail is gone: {error}"), ""),
            }
        })
    }
}

/// A shim that is being started, by a thread of its own. Dropped before it is finished, the shim ends.
struct Spawning(Option<thread::JoinHandle<io::Result<Shim>>>);

impl Spawning {
    fn begin(enforcer: &Enforcer, shim: &Path) -> io::Result<Spawning> {
        let shim = shim.to_owned();
        enforcer.spawn_inside(move || launch::spawn(&shim)).map(|thread| Spawning(Some(thread)))
    }

    fn finish(mut self) -> io::Result<Shim> {
        self.join()
    }

    fn join(&mut self) -> io::Result<Shim> {
        let joined = self.0.take().map(thread::JoinHandle::join);
        joined.and_then(Result::ok).unwrap_or_else(|| Err(io::Error::other("the thread that starts the shim panicked")))
    }
}

impl Drop for Spawning {
    fn drop(&mut self) {
        if self.0.is_none() {
            return;
        }
        if let Ok(mut shim) = self.join() {
            // It waits for its plan, and ends when there will be none.
            shim.close();
            let _ = shim.child.wait();
        }
    }
}

/// Waits until the outer process, and with it the whole jail, is gone.
pub(super) fn reap(shim: &mut Shim, enforcer: &Enforcer) {
    shim.close();
    loop {
        match shim.child.try_wait() {
            Ok(Some(_)) | Err(_) => return,
            Ok(None) => {}
        }
        // Usually the kernel is done within a millisecond or two.
        let waited = wait_briefly(shim, KILL_AGAIN);
        if !waited {
            enforcer.kill();
            let _ = shim.child.kill();
        }
    }
}

/// Whether the child ended within this time, by its process descriptor (pidfd_open(2)).
pub(super) fn wait_briefly(shim: &mut Shim, time: Duration) -> bool {
    let deadline = std::time::Instant::now() + time;
    // The child is ours and not reaped, so its number means it. Without a descriptor to be had, only looking again
    // and again is left.
    let handle = kernel::pidfd_open(Pid::from_raw(shim.child.id() as i32)).ok();
    loop {
        if matches!(shim.child.try_wait(), Ok(Some(_)) | Err(_)) {
            return true;
        }
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return false;
        }
        let watched = handle.as_ref().and_then(|handle| {
            // Rounded up: a wait of no time at all would be a busy loop.
            let most = u16::try_from(left.as_millis() + 1).unwrap_or(u16::MAX);
            let mut handles = [PollFd::new(handle.as_fd(), PollFlags::POLLIN)];
            poll(&mut handles, PollTimeout::from(most)).ok()
        });
        if watched.is_none() {
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// What the listening thread tells, and to whom.
struct Ears {
    events: mpsc::Sender<Event>,
    questions: tokio::sync::mpsc::UnboundedSender<Question>,
    deferred: Arc<Deferred>,
    doors: Arc<Opening>,
    dialler: Arc<Dialler>,
    knocked: Option<[OwnedFd; 2]>,
}

impl Ears {
    /// Listens, on a thread of its own, to the shim, to signals, and for the first who connects to the run's sockets.
    /// It goes on with signals when the run is over: they are kept then.
    fn listen(mut self, shim: &Shim) -> io::Result<()> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&handled(), flags)?;
        let mut listener = Some(shim.listener()?);
        let speaker = Arc::new(shim.speaker()?);
        thread::Builder::new().name("ears".to_owned()).stack_size(256 * 1024).spawn(move || loop {
            let ready = match self.wait(&signals, listener.as_ref()) {
                Ok(ready) => ready,
                // Deaf, nobody would know of the jail's end.
                Err(error) => {
                    tracing::error!(%error, "the run cannot be listened to any more");
                    let _ = self.events.send(Event::JailGone);
                    return;
                }
            };
            if ready.knocked {
                self.knocked = None;
                if let Err(error) = self.doors.open() {
                    tracing::error!(%error, "the run's sockets are not served");
                }
            }
            if ready.signal {
                self.hear_signals(&signals);
            }
            if let (true, Some(shim)) = (ready.shim, &listener) {
                if self.hear_shim(shim, &speaker) == Heard::Last {
                    listener = None;
                    self.knocked = None;
                }
            }
        })?;
        Ok(())
    }

    fn wait(&self, signals: &SignalFd, shim: Option<&ShimListener>) -> io::Result<Ready> {
        let wanted = PollFlags::POLLIN;
        let mut polled = vec![PollFd::new(signals.as_fd(), wanted)];
        polled.extend(shim.map(|shim| PollFd::new(shim.as_fd(), wanted)));
        polled.extend(self.knocked.iter().flatten().map(|socket| PollFd::new(socket.as_fd(), wanted)));
        match poll(&mut polled, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Ready::default()),
            Err(errno) => return Err(errno.into()),
        }
        let mut happened = polled.iter().map(|one| one.revents().is_some_and(|events| !events.is_empty()));
        let signal = happened.next().unwrap_or(false);
        let shim = shim.is_some() && happened.next().unwrap_or(false);
        Ok(Ready { signal, shim, knocked: happened.any(|knocked| knocked) })
    }

    fn hear_signals(&self, signals: &SignalFd) {
        while let Ok(Some(info)) = signals.read_signal() {
            let Ok(signal) = Signal::try_from(info.ssi_signo as i32) else { continue };
            if self.events.send(Event::Signal(signal)).is_err() {
                // The program is over.
                self.deferred.keep(signal);
            }
        }
    }

    fn hear_shim(&self, shim: &ShimListener, speaker: &Arc<ShimSpeaker>) -> Heard {
        let event = match shim.hear() {
            // Past the main thread, which may be busy with something that takes longer than a call should wait.
            Ok(Some((FromShim::Asked(asked), _))) => {
                let (id, speaker) = (asked.id, Arc::clone(speaker));
                let reply = Box::new(move |errno| {
                    // A jail that is gone wants no answer.
                    let _ = speaker.tell(&ToShim::Answer { id, errno });
                });
                let _ = self.questions.send(Question { asked, reply });
                return Heard::More;
            }
            Ok(Some((FromShim::Dialled { id, errno }, attached))) => {
                self.dialler.dialled(id, errno, attached.into_iter().next());
                return Heard::More;
            }
            Ok(Some((message, attached))) => Event::Shim(message, attached),
            Ok(None) | Err(_) => Event::JailGone,
        };
        let last = matches!(event, Event::JailGone);
        match self.events.send(event).is_err() || last {
            true => Heard::Last,
            false => Heard::More,
        }
    }
}

/// What can be heard without waiting.
#[derive(Default)]
struct Ready {
    signal: bool,
    shim: bool,
    knocked: bool,
}

/// Whether the shim may say more.
#[derive(PartialEq, Eq)]
enum Heard {
    /// It may.
    More,
    /// It is gone, or nobody wants to know.
    Last,
}

pub(super) fn terminal_of(streams: &Streams) -> Option<Terminal> {
    streams.on_terminal.contains(&true).then(|| {
        let all: Vec<_> = streams.streams.iter().map(AsFd::as_fd).collect();
        let (rows, columns) = streams::size_of_any(&all).unwrap_or((24, 80));
        Terminal { on: streams.on_terminal, rows, columns }
    })
}
