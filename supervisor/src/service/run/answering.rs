//! What answers in the world's place during a run, and what its program is asked about one by one.

use super::{super::files::LateFiles, Apply, RunRequest};
use crate::{
    chain::{
        admission::{HostPattern, Kinds, Listed, Origin, Paths, Rule, Target, Verdict},
        faults::{FaultRule, Faults},
        record::Record,
        recording::{self, Applied, End, Head, Recording, Writer},
        replay::{Replay, ReplayReport, Substitute},
        stack::{Element, Step},
        World,
    },
    doors::program,
    effect::{http, net, path::escape, Digest, Door, Kind, Request, RunId},
    ledger::Ledger,
    policy::Policy,
    world::http::Delivery,
};
use std::{
    fs::File,
    io::{self, BufWriter, Read as _},
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    path::Path,
    sync::Arc,
};
use tollgate_shim::protocol::Asking;

/// How a run's effects are answered, beside by the world. The default changes nothing.
#[derive(Clone, Debug, Default)]
pub struct Answering {
    /// Which of the program's own calls have a receipt each.
    pub receipts: Receipts,
    /// The answering handlers, outermost first. Those of the policy come before them.
    pub modes: Vec<Mode>,
}

/// One answering handler.
#[derive(Clone, Debug)]
pub enum Mode {
    /// Effects go wrong by these rules.
    Faults(Vec<FaultRule>),
    /// Effects and their answers are written down.
    Record,
    /// Effects are answered from a recording, and none reaches the world.
    Replay(Box<Source>),
}

/// What a replay answers from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The recording.
    pub recording: Recording,
    /// One answer given in the place of a recorded one.
    pub substitute: Option<Substitute>,
}

/// The file of a run's own folder that holds its recording.
pub const RECORDING: &str = "recording";
/// The file of a run's own folder that holds what its program was given, while it is recorded.
pub(super) const INPUT: &str = "stdin.log";
/// The most of standard input that a recording holds.
const MAX_INPUT: u64 = 64 << 20;

/// Which of what a program does itself has a receipt of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Receipts {
    /// What it changed, when it ends, and what the jail refused it
    #[default]
    Changes,
    /// Also each open, deletion and renaming in the workspace, each execution and each connection, as it happens
    Opens,
}

impl Answering {
    /// The recording that is replayed, if one is.
    pub fn replayed(&self) -> Option<&Recording> {
        self.modes.iter().find_map(|mode| match mode {
            Mode::Replay(source) => Some(&source.recording),
            Mode::Faults(_) | Mode::Record => None,
        })
    }

    /// Whether the run is recorded.
    pub(super) fn records(&self) -> bool {
        self.modes.iter().any(|mode| matches!(mode, Mode::Record))
    }

    /// The handlers of the policy, then those that were asked for. A replay takes none of the policy's: what they
    /// answered is in the recording.
    pub fn under(self, policy: &Policy) -> Answering {
        if self.replayed().is_some() {
            return self;
        }
        let mut modes = Vec::new();
        if policy.handlers.record && !self.records() {
            modes.push(Mode::Record);
        }
        if !policy.handlers.faults.is_empty() {
            modes.push(Mode::Faults(policy.handlers.faults.clone()));
        }
        modes.extend(self.modes);
        Answering { modes, ..self }
    }

    /// The policy of a replay: what was reached over the network when it was recorded is admitted as far as the
    /// recording, which answers it. Nothing of it reaches the world.
    pub(super) fn reaching_what_was_recorded(&self, mut policy: Policy) -> Policy {
        let entries = self.replayed().map(|recording| recording.entries.as_slice()).unwrap_or_default();
        // Each target by the kind it was reached by, so that a connection is taken for the same now as then.
        let targets =
            entries.iter().filter(|entry| entry.door == Door::Network).filter_map(|entry| match &entry.request {
                Request::Http(http::Request { host, port, .. })
                | Request::Net(net::Request::Connect { host, port, .. }) => {
                    Some((entry.kind, HostPattern::parse(host).ok()?, *port))
                }
                _ => None,
            });
        let mut targets: Vec<(Kind, HostPattern, u16)> = targets.collect();
        targets.sort();
        targets.dedup();
        let rules: Vec<Rule> = targets
            .into_iter()
            .map(|(kind, host, port)| Rule {
                verdict: Verdict::Allow,
                kinds: Kinds::Only(vec![kind]),
                paths: Paths::Any,
                target: Target { hosts: Some(Listed::new(vec![host])), ports: Some(vec![port]), ..Target::default() },
                origin: Origin {
                    file: "the recording".to_owned(),
                    line: 0,
                    text: "allow what was reached when it was recorded, to be answered from it".to_owned(),
                },
            })
            .collect();
        if !rules.is_empty() {
            policy.admission = policy.admission.with_rules(&policy.name.clone(), rules);
        }
        policy
    }

    /// How answers to requests reach the program: whole where a fault may still change them.
    pub(super) fn delivery(&self) -> Delivery {
        let changes = |mode: &Mode| match mode {
            Mode::Faults(rules) => rules.iter().any(|rule| rule.is_about(Kind::HttpRequest)),
            Mode::Record | Mode::Replay(_) => false,
        };
        match (self.modes.iter().any(changes), self.records()) {
            (true, _) => Delivery::Held,
            (false, true) => Delivery::Copied,
            (false, false) => Delivery::Live,
        }
    }

    /// The kinds of calls that wait for the chain.
    fn waiting(&self) -> Vec<Kind> {
        if self.receipts == Receipts::Opens {
            return program::KINDS.iter().map(|(kind, _)| *kind).collect();
        }
        let of_mode = |mode: &Mode| match mode {
            Mode::Faults(rules) => rules.iter().flat_map(FaultRule::waiting_kinds).collect::<Vec<_>>(),
            Mode::Record => Vec::new(),
            Mode::Replay(source) => source.recording.head.waiting.clone(),
        };
        let mut kinds: Vec<Kind> = self.modes.iter().flat_map(of_mode).collect();
        kinds.sort();
        kinds.dedup();
        kinds
    }

    /// The same, as the shim calls them.
    pub(super) fn asked(&self) -> Vec<Asking> {
        let waiting = self.waiting();
        program::KINDS.iter().filter(|(kind, _)| waiting.contains(kind)).map(|(_, asking)| *asking).collect()
    }
}

/// The answering handlers of one run, made before it starts.
#[derive(Default)]
pub(super) struct Handlers {
    elements: Vec<Element>,
    faults: Vec<Arc<Faults>>,
    record: Option<Arc<Record>>,
    replay: Option<Arc<Replay>>,
    /// What is worth saying before anything has happened.
    pub(super) notes: Vec<String>,
}

/// What the handlers found, once the run is over.
#[derive(Default)]
pub(super) struct Found {
    pub(super) injected: Option<u64>,
    pub(super) recording: Option<Digest>,
    pub(super) replay: Option<ReplayReport>,
    pub(super) notes: Vec<String>,
}

impl Handlers {
    /// Makes the handlers of this run, in its folder.
    ///
    /// # Errors
    /// In words, what keeps a recording from being begun or a replay from being one.
    pub(super) fn prepare(
        request: &RunRequest,
        run: &RunId,
        folder: &Path,
        ledger: &Ledger,
        environment: &[String],
        files: &LateFiles,
    ) -> Result<Handlers, String> {
        let mut handlers = Handlers::default();
        let answering = &request.answering;
        let base = match answering.records() || answering.replayed().is_some() {
            true => recording::base_of(&request.workspace, ledger.state())
                .map_err(|error| format!("the workspace cannot be listed for the recording: {error}"))?,
            false => Vec::new(),
        };
        for mode in &answering.modes {
            let step = match mode {
                Mode::Faults(rules) => {
                    let faults = Arc::new(Faults::new(rules.clone()));
                    handlers.faults.push(faults.clone());
                    Step(faults)
                }
                Mode::Record => {
                    let file = File::options().create_new(true).write(true).mode(0o600).open(folder.join(RECORDING));
                    let sink = file.map_err(|error| format!("the recording cannot be begun: {error}"))?;
                    let head = head(request, run, ledger, environment);
                    let writer = Writer::begin(Box::new(BufWriter::new(sink)), head, base.clone());
                    let writer = writer.map_err(|error| format!("the recording cannot be begun: {error}"))?;
                    let record = Arc::new(Record::new(writer));
                    handlers.record = Some(record.clone());
                    Step(record)
                }
                Mode::Replay(source) => {
                    let Source { recording, substitute } = (**source).clone();
                    handlers.notes.extend(unlike(&recording.head, request, environment));
                    let layer: Arc<dyn World> = Arc::new(files.clone());
                    let replay = Replay::new(recording, substitute, Some(layer)).map_err(|error| error.to_string())?;
                    replay.compare_base(&base);
                    let replay = Arc::new(replay);
                    handlers.replay = Some(replay.clone());
                    Step(replay)
                }
            };
            handlers.elements.push(Element::Answering(step));
        }
        Ok(handlers)
    }

    /// Their places in the stack, in the order given.
    pub(super) fn elements(&self) -> Vec<Element> {
        self.elements.clone()
    }

    /// Whether nothing that the run changed may reach the world.
    pub(super) fn replays(&self) -> bool {
        self.replay.is_some()
    }

    /// Ends the recording, and says what was found.
    pub(super) fn finish(&self, folder: &Path, exit_status: u8) -> Found {
        let mut found = Found {
            injected: (!self.faults.is_empty()).then(|| self.faults.iter().map(|faults| faults.injected()).sum()),
            ..Found::default()
        };
        if self.record.is_none() && self.replay.is_none() {
            return found;
        }
        let stream = |name: &str| recording::digest_of(&folder.join(name)).ok();
        let (stdout, stderr) = (stream("stdout.log"), stream("stderr.log"));
        if let Some(record) = &self.record {
            let ended = input(&folder.join(INPUT)).and_then(|input| {
                let stdin = input
                    .as_deref()
                    .map(|bytes| recording::Stream { digest: Digest::of(bytes), bytes: bytes.len() as u64 });
                record.finish(input.as_deref(), End { exit_status, stdin, stdout, stderr, entries: 0 })
            });
            match ended {
                Ok(digest) => found.recording = Some(digest),
                Err(error) => found.notes.push(format!("the run is not recorded: {error}")),
            }
            let _ = std::fs::remove_file(folder.join(INPUT));
        }
        found.replay = self.replay.as_ref().map(|replay| replay.finish(stdout, stderr, exit_status));
        found
    }
}

/// What the program was given.
fn input(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(MAX_INPUT + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MAX_INPUT {
        true => Err(io::Error::other(format!("its program was given more than {MAX_INPUT} bytes on standard input"))),
        false => Ok(Some(bytes)),
    }
}

fn head(request: &RunRequest, run: &RunId, ledger: &Ledger, environment: &[String]) -> Head {
    let text = |path: &Path| escape(path.as_os_str().as_bytes());
    Head {
        format: recording::FORMAT.to_owned(),
        run: run.clone(),
        recorded_at: ledger.clock().now().to_string(),
        command: request.command.iter().map(|word| escape(word.as_bytes())).collect(),
        policy: request.policy.name.clone(),
        policy_digest: request.policy.digest.to_string(),
        workspace: text(&request.workspace),
        directory: text(&request.directory),
        environment: environment.to_vec(),
        waiting: request.answering.waiting(),
        apply: match request.apply {
            Apply::WhenItEnds => Applied::WhenItEnds,
            Apply::OnRequest => Applied::OnRequest,
        },
    }
}

/// What of a replay's surroundings is not what it was: no divergence by itself, and a likely cause of one.
fn unlike(head: &Head, request: &RunRequest, environment: &[String]) -> Vec<String> {
    let mut notes = Vec::new();
    if head.policy_digest != request.policy.digest.to_string() {
        notes.push(format!("the policy is not the one of the recording, `{}`", head.policy));
    }
    if head.workspace != escape(request.workspace.as_os_str().as_bytes()) {
        notes.push(format!("the workspace is not where it was recorded, {}", head.workspace));
    }
    if head.command != request.command.iter().map(|word| escape(word.as_bytes())).collect::<Vec<_>>() {
        notes.push(format!("the command is not the recorded one, `{}`", head.command.join(" ")));
    }
    if head.environment != environment {
        notes.push("other variables pass into the jail than when it was recorded".to_owned());
    }
    notes
}
