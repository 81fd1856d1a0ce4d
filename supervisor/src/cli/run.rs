//! `tollgate run`: run a program in a jail.

use super::output::{escape, Failure};
use crate::{
    chain::{
        approval::{self, Attendance},
        faults::{FaultRule, RuleError},
        quota::{Amounts, Unit},
        recording::{Applied, Recording},
        replay::Substitute,
    },
    effect::{Kind, RunId},
    jail::outcome,
    ledger::{
        self,
        record::{ChangesState, OutcomeType, RunMode},
        Ledger,
    },
    policy::{
        limits::Bound,
        overrides::{split_variable, Overrides},
        published::Published,
        quantity,
        search::PolicyRef,
        Launcher, Policy,
    },
    service::{
        caller, memory,
        plan::Plan,
        recovery,
        run::{self, Answering, Apply, Asking, Copy, Mode, Receipts, Refusal, RunReport, RunRequest, Source, Streams},
    },
};
use std::{
    ffi::OsString,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};
use tollgate_shim::protocol::Layer;

/// The environment variable by which a test build takes layers out.
const WITHOUT_VARIABLE: &str = "TOLLGATE_TEST_WITHOUT";
/// How many refused hosts the summary of a run names.
const HOSTS: usize = 10;
/// How many refusals the summary of a run explains.
const EXPLAINED: usize = 5;

/// Run a program in a jail.
///
/// The program sees its workspace (the current folder) through a layer of its own, the system's programs read-only,
/// and nothing else of this machine; it has no network but its own loopback, unless the policy or `--allow` names hosts. When it ends, what it changed passes
/// the policy and is applied to the folder as one batch. Every effect has a receipt.
///
/// The exit status is the program's own; a signal is 128 plus its number. Tollgate's own are 124 wall time used up,
/// 137 memory used up, 152 processor time used up, 153 too much written, 154 too much printed, 155 too many
/// processes, 125 refused, could not start or could not apply, 126 not executable, 127 not found.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The policy: a name, or a path to a file [default: default]
    #[arg(long, short, value_name = "POLICY")]
    pub policy: Option<String>,
    /// The folder that the program works in [default: the current one]
    #[arg(long, short = 'C', value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Show the workspace read-only
    #[arg(long)]
    pub read_only: bool,
    /// Keep the changes for `tollgate apply` instead of applying them when the program ends
    #[arg(long)]
    pub no_apply: bool,
    /// Execute the program and not its effects: its changes stay in its own layer, what reaches outside is answered by a
    /// stand-in, and `tollgate plan RUN` shows what it would have done
    #[arg(long, conflicts_with = "plan")]
    pub preflight: bool,
    /// Allow only what this preflighted run planned, within the policy; what the policy asks about is approved with it
    #[arg(long, value_name = "RUN")]
    pub plan: Option<String>,
    /// Work on a copy of the workspace instead of an overlay
    #[arg(long)]
    pub mirror: bool,
    /// Wall time, as in `90s` or `10min`
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub wall: Option<Bound<Duration>>,
    /// Processor time of all processes together
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub cpu: Option<Bound<Duration>>,
    /// Memory of all processes together, as in `2GiB`
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    pub memory: Option<Bound<u64>>,
    /// Processes and threads alive at once
    #[arg(long, value_name = "COUNT", value_parser = quantity::count)]
    pub pids: Option<Bound<u64>>,
    /// Processors' worth of time, as in `1.5`
    #[arg(long, value_name = "NUMBER", value_parser = quantity::cpus)]
    pub cpus: Option<Bound<f64>>,
    /// Bytes that the program may write to its workspace
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    pub write_bytes: Option<Bound<u64>>,
    /// Bytes that the program may print
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    pub output_bytes: Option<Bound<u64>>,
    /// Bytes that the program may send to hosts outside
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    pub egress_bytes: Option<Bound<u64>>,
    /// Effects that the run may have, whatever they are
    #[arg(long, value_name = "COUNT", value_parser = quantity::count)]
    pub effects: Option<Bound<u64>>,
    /// Charge what the run does to a quota that runs share, made with `tollgate quota set`; with a size, at most so
    /// many bytes written, and the first run that names it makes it
    #[arg(long = "quota", value_name = "ID[=SIZE]", value_parser = quota)]
    pub quotas: Vec<(String, Amounts)>,
    /// What happens to an effect that a rule asks about: it waits for `tollgate approve`, or is refused at once
    /// [default: wait if standard input or standard error is a terminal, else refuse]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub ask: Option<AskChoice>,
    /// How long such an effect waits, as in `5min`; the wall time of the run goes on meanwhile
    #[arg(long, value_name = "TIME", value_parser = finite)]
    pub approval_timeout: Option<Duration>,
    /// Allow a host outside; may be given again
    ///
    /// HOST is every request to it over http and https, HOST:PORT every request and connection to that port, and
    /// 'GET,HEAD https://HOST/PATH/**' those requests alone. HOST may be `*.SUFFIX`, all names below it. What a rule of
    /// the policy denies stays denied.
    #[arg(long = "allow", value_name = "HOST|URL")]
    pub allow: Vec<String>,
    /// Refuse a host outside, whatever allows it; written as for `--allow`
    #[arg(long = "deny", value_name = "HOST|URL")]
    pub deny: Vec<String>,
    /// Let the program reach this port of the host's own loopback, at 127.0.0.1 and ::1
    #[arg(long = "host-port", value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub host_ports: Vec<u16>,
    /// Let the host connect to a port of the program's, at this address and port of the host; may be given again
    ///
    /// 127.0.0.1 unless an address is named, and the same port unless two are. Each connection is one effect,
    /// `net/accept`. Without this nothing outside reaches a server in the jail.
    #[arg(long, value_name = "[[ADDRESS:]PORT:]PORT", conflicts_with = "replay")]
    pub publish: Vec<Published>,
    /// A private address or network that a name may lead to, as in `api.test=10.1.0.0/16`
    #[arg(long = "private", value_name = "HOST=CIDR")]
    pub private: Vec<String>,
    /// Where the names of allowed hosts are looked up [default: as this machine does]
    #[arg(long, value_name = "ADDRESS", value_parser = crate::policy::network::resolver)]
    pub resolver: Option<SocketAddr>,
    /// Pass a variable of this environment (`NAME`, or `PREFIX*`), or set one (`NAME=VALUE`)
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub environment: Vec<String>,
    /// Show a host file or folder, read-only, at its own path
    #[arg(long = "view", value_name = "PATH")]
    pub views: Vec<String>,
    /// The profile that the view is made from
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Who makes the namespaces
    #[arg(long, value_enum)]
    pub launcher: Option<LauncherName>,
    /// Run without the layers and limits that this machine cannot give; every receipt of the run says which
    #[arg(long)]
    pub best_effort: bool,
    /// Which of what the program does itself has a receipt
    #[arg(long, value_enum, default_value_t = Receipts::Changes, value_name = "WHICH")]
    pub receipts: Receipts,
    /// Make effects go wrong, as in `fs/write:error=ENOSPC,rate=0.1,seed=7,path=**/*.log`; may be given again
    ///
    /// KIND[+KIND…]:FAULT[=WHAT], then any of rate=R, seed=N, path=GLOB, first=N, when=before|after,
    /// door=api|program|network|workspace and retry-after=SECONDS. FAULT is error, timeout, rate-limit, truncated, corrupted or
    /// cut; docs/effects.md has what each kind can show. A program sees such an error as if the kernel gave it.
    #[arg(long, value_name = "RULE", value_parser = fault_rule)]
    pub faults: Vec<FaultRule>,
    /// Write down every effect with its answer, for `--replay`
    #[arg(long)]
    pub record: bool,
    /// Answer every effect from a recording: a run, or a file of `tollgate recording export`
    ///
    /// Nothing reaches the world and nothing is applied. Without a command, the recorded one is run, under the recorded
    /// policy; standard input is the recorded one. A run that is not as recorded says where it first differs and ends
    /// with status 125.
    #[arg(long, value_name = "RUN|FILE")]
    pub replay: Option<String>,
    /// Give one recorded effect another answer, SEQ=FILE or SEQ=JSON, and see where the run then differs
    #[arg(long, value_name = "SEQ=ANSWER", requires = "replay")]
    pub substitute: Option<String>,
    /// In which order the answering handlers were given
    #[arg(skip)]
    pub order: Vec<Given>,
    /// Whether the program gets a terminal of its own
    #[arg(long, value_enum, default_value_t = TerminalChoice::Auto, value_name = "WHEN")]
    pub tty: TerminalChoice,
    /// Say nothing on standard error, unless the run could not start or its changes could not be applied
    #[arg(long, short)]
    pub quiet: bool,
    /// The program and its arguments
    #[arg(last = true, required_unless_present = "replay", value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// An answering handler on the command line, where the order counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// One `--faults`.
    Faults,
    /// `--record`.
    Record,
    /// `--replay`.
    Replay,
}

impl Args {
    /// Remembers in which order the answering handlers stand on the command line.
    pub fn note_order(&mut self, matches: &clap::ArgMatches) {
        let places = [("faults", Given::Faults), ("record", Given::Record), ("replay", Given::Replay)]
            .into_iter()
            .flat_map(|(id, given)| {
                let typed = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
                let places = matches.indices_of(id).filter(|_| typed).into_iter().flatten();
                places.map(move |place| (place, given)).collect::<Vec<_>>()
            });
        let mut places: Vec<(usize, Given)> = places.collect();
        places.sort_by_key(|(place, _)| *place);
        self.order = places.into_iter().map(|(_, given)| given).collect();
    }

    /// The answering handlers in the order given; fault rules that stand together are one handler.
    fn modes(&self, source: Option<Source>) -> Vec<Mode> {
        let mut source = source.map(Box::new);
        let mut rules = self.faults.iter().cloned();
        let mut modes: Vec<Mode> = Vec::new();
        for given in &self.order {
            match given {
                Given::Faults => match modes.last_mut() {
                    Some(Mode::Faults(together)) => together.extend(rules.next()),
                    _ => modes.push(Mode::Faults(rules.next().into_iter().collect())),
                },
                Given::Record => modes.push(Mode::Record),
                Given::Replay => modes.extend(source.take().map(Mode::Replay)),
            }
        }
        modes
    }
}

fn fault_rule(text: &str) -> Result<FaultRule, String> {
    text.parse().map_err(|error: RuleError| match error.help.is_empty() {
        true => error.message,
        false => format!("{}; {}", error.message, error.help),
    })
}

/// Who makes the namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LauncherName {
    /// Tollgate's own shim
    Native,
    /// Bubblewrap
    Bwrap,
}

/// What happens to an effect that a rule asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AskChoice {
    /// It waits for a person's word
    Wait,
    /// Nobody is there: it is refused at once
    Refuse,
}

fn finite(text: &str) -> Result<Duration, String> {
    match quantity::duration(text) {
        Ok(Bound::At(time)) => Ok(time),
        Ok(Bound::Unlimited) => Err("a question cannot wait for ever".to_owned()),
        Err(error) => Err(format!("it {error}; write {}", quantity::DURATION_FORM)),
    }
}

fn quota(text: &str) -> Result<(String, Amounts), String> {
    let (id, limits) = match text.split_once('=') {
        None => (text, Amounts::new()),
        Some((id, size)) => match quantity::size(size) {
            Ok(Bound::At(bytes)) => (id, Amounts::from([(Unit::WriteBytes, bytes)])),
            Ok(Bound::Unlimited) => return Err("leave the size out to take the quota's own".to_owned()),
            Err(error) => return Err(format!("the size {error}; write {}", quantity::SIZE_FORM)),
        },
    };
    super::quota::check_id(id)?;
    Ok((id.to_owned(), limits))
}

/// Whether the program gets a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TerminalChoice {
    /// Each stream that is a terminal here is one there
    Auto,
    /// No stream is
    Never,
}

/// Runs the program.
pub fn run(args: Args, state: Option<&Path>) -> Result<ExitCode, Failure> {
    memory::share_one_heap();
    // Before any thread exists, so that every thread has them blocked.
    run::take_signals().map_err(|error| refused(format!("signals: {error}"), ""))?;
    let quiet = args.quiet;
    let state = match state {
        Some(path) => path.to_owned(),
        None => ledger::state_dir().map_err(|error| refused(error.to_string(), ""))?,
    };
    let source = source(&args, &state)?;
    let ledger = Ledger::open(&state).map_err(|error| refused(error.to_string(), ""))?;
    let (mut request, streams) = prepare(args, source, &ledger)?;
    request.recipe = super::resume::recipe(std::env::args_os());
    // First: a batch that a crash left half done must not be the ground that this run stands on.
    if ledger.had_live_runs().map_err(|error| refused(error.to_string(), ""))? {
        for recovered in recovery::recover(&ledger) {
            if !quiet {
                eprintln!("tollgate: {}", escape(&recovered.to_string()));
            }
        }
    }
    carry_out(&ledger, request, streams, quiet)
}

/// Runs what was asked for, and says how it ended.
///
/// # Errors
/// What keeps the run out of the ledger.
pub(super) fn carry_out(
    ledger: &Ledger,
    request: RunRequest,
    streams: Streams,
    quiet: bool,
) -> Result<ExitCode, Failure> {
    let report = run::run(ledger, request, streams).map_err(|error| refused(error.to_string(), ""))?;
    let failed = report.record.outcome.as_ref().is_some_and(|outcome| ours(outcome.kind));
    if !quiet || failed {
        // With standard error closed there is nobody to tell.
        let _ = summarise(&report, &mut io::stderr());
    }
    Ok(ExitCode::from(report.exit_status))
}

/// Lets a run do only what another planned.
fn keep_to_plan(request: &mut RunRequest, ledger: &Ledger, plan: Option<&str>) -> Result<(), Failure> {
    if let Some(plan) = plan {
        let record =
            ledger.run(plan).map_err(|error| refused(error.to_string(), "`tollgate ps --all` lists the runs"))?;
        let plan = Plan::of(ledger, &record.id)
            .map_err(|error| refused(error.to_string(), "`tollgate run --preflight -- COMMAND` makes a plan"))?;
        // Whoever names the plan has read it: what the policy asks about is approved, as far as it was planned.
        request.policy.admission = request.policy.admission.approved().narrow(&plan.admission());
        request.mode = RunMode::Planned { plan: record.id };
    }
    Ok(())
}

/// The recording that is to be replayed.
///
/// # Errors
/// When there is none, or it was changed.
pub(super) fn source(args: &Args, state: &Path) -> Result<Option<Source>, Failure> {
    let Some(reference) = &args.replay else { return Ok(None) };
    let recording = super::recording::load(reference, state)
        .map_err(|failure| Failure { status: outcome::ExitCode::NotDone.number(), ..failure })?;
    let substitute = args.substitute.as_deref().map(Substitute::parse).transpose();
    let substitute = substitute.map_err(|error| refused(error.to_string(), ""))?;
    Ok(Some(Source { recording, substitute }))
}

/// The words of a recorded command.
fn recorded_command(recording: &Recording) -> Result<Vec<OsString>, Failure> {
    let word = |text: &String| {
        let bytes = crate::effect::path::unescape(text);
        let wrong = |error: crate::effect::path::BadPath| refused(format!("the recorded command: {error}"), "");
        bytes.map(std::os::unix::ffi::OsStringExt::from_vec).map_err(wrong)
    };
    recording.head.command.iter().map(word).collect()
}

/// A standard input that holds these bytes.
fn input_of(recording: &Recording) -> io::Result<std::os::fd::OwnedFd> {
    use io::Seek as _;
    let name = c"recorded input";
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let mut file = std::fs::File::from(nix::sys::memfd::memfd_create(name, flags)?);
    if let Some(bytes) = recording.end.stdin.and_then(|stdin| recording.contents.get(&stdin.digest)) {
        file.write_all(bytes)?;
        file.rewind()?;
    }
    Ok(file.into())
}

/// What the options mean.
///
/// # Errors
/// What in them cannot be had.
pub(super) fn prepare(
    mut args: Args,
    source: Option<Source>,
    ledger: &Ledger,
) -> Result<(RunRequest, Streams), Failure> {
    let mut apply = if args.no_apply { Apply::OnRequest } else { Apply::WhenItEnds };
    let mut input = None;
    if let Some(Source { recording, .. }) = &source {
        if args.command.is_empty() {
            args.command = recorded_command(recording)?;
        }
        if args.policy.is_none() {
            args.policy = Some(recording.head.policy.clone());
        }
        apply = match recording.head.apply {
            Applied::WhenItEnds => Apply::WhenItEnds,
            Applied::OnRequest => Apply::OnRequest,
        };
        let made = input_of(recording);
        input = Some(made.map_err(|error| refused(format!("the recorded input: {error}"), "free some memory"))?);
    }
    if args.record || source.is_some() {
        // A terminal mixes streams and echoes: what passes through it is no stream that could be compared.
        args.tty = TerminalChoice::Never;
    }
    let search = super::search_path();
    let home = search.home.clone();
    let as_refusal = |error: crate::policy::fault::PolicyError| Failure {
        status: outcome::ExitCode::NotDone.number(),
        ..Failure::from(&error)
    };
    let reference = match &args.policy {
        Some(text) => PolicyRef::parse(text).map_err(as_refusal)?,
        None => PolicyRef::default(),
    };
    let overrides = overrides(&args);
    let policy = Policy::load(&reference, &search).map_err(as_refusal)?;
    let policy = policy.with(&overrides, home.as_deref()).map_err(as_refusal)?;
    let here = std::env::current_dir()
        .map_err(|error| refused(format!("the current folder: {error}"), "change into a folder that exists"))?;
    let named = args.workspace.clone().unwrap_or(here);
    let workspace = named.canonicalize().map_err(|error| {
        refused(format!("the workspace {}: {error}", named.display()), "name a folder that exists with --workspace")
    })?;
    if !workspace.is_dir() {
        return Err(refused(format!("the workspace {} is not a folder", workspace.display()), "name a folder"));
    }
    if home.as_deref().and_then(|home| home.canonicalize().ok()).as_ref() == Some(&workspace) && !args.quiet {
        eprintln!(
            "tollgate: {} is your home folder: the run sees all of it but keys and the like, and what it changes there \
             is applied; name a project's folder with --workspace",
            escape(&workspace.to_string_lossy())
        );
    }
    let without = without()?;
    let own = |stream: io::Result<std::os::fd::OwnedFd>| {
        stream.map_err(|error| refused(format!("a standard stream: {error}"), "start with all three open"))
    };
    let on_terminal = match args.tty {
        TerminalChoice::Auto => [io::stdin().is_terminal(), io::stdout().is_terminal(), io::stderr().is_terminal()],
        TerminalChoice::Never => [false; 3],
    };
    let streams = Streams {
        streams: [
            input.map_or_else(|| own(run::own_stream(io::stdin())), Ok)?,
            own(run::own_stream(io::stdout()))?,
            own(run::own_stream(io::stderr()))?,
        ],
        on_terminal,
    };
    let there = match args.ask {
        Some(AskChoice::Wait) => true,
        Some(AskChoice::Refuse) => false,
        None => io::stdin().is_terminal() || io::stderr().is_terminal(),
    };
    let limit = policy.approval_timeout.unwrap_or(approval::DEFAULT_LIMIT);
    let asking = Asking {
        attendance: if there { Attendance::Somebody { limit } } else { Attendance::Nobody },
        // A terminal that the program draws on is its own: no byte of ours goes there.
        notice: notice(args.quiet || on_terminal[2]),
    };
    let answering = Answering { receipts: args.receipts, modes: args.modes(source) };
    let mut request = RunRequest {
        command: args.command,
        policy,
        directory: workspace.clone(),
        workspace,
        environment: std::env::vars_os().collect(),
        caller: caller::current(),
        apply,
        copy: if args.mirror { Copy::Mirror } else { Copy::Overlay },
        answering,
        asking,
        published: args.publish,
        quotas: args.quotas,
        without,
        mode: if args.preflight { RunMode::Preflight } else { RunMode::Live },
        preflight: args.preflight.then(Arc::default),
        resumes: None,
        recipe: None,
        notice: if args.quiet { |_| {} } else { say },
    };
    keep_to_plan(&mut request, ledger, args.plan.as_deref())?;
    Ok((request, streams))
}

/// Tells on standard error that something waits for a person, and how to answer. On a thread of its own: whoever
/// reads our standard error may be slow, and the run does not wait for them.
fn notice(silent: bool) -> approval::Notice {
    Arc::new(move |parked: &approval::Parked| {
        if silent {
            return;
        }
        let asks = format!("{} {}", parked.kind, parked.resource);
        let text = format!(
            "tollgate: run {} waits for a person: {} ({}), by the rule {}; `tollgate approve {id}` or `tollgate deny {id}` \
             before {}\n",
            parked.run,
            escape(&asks),
            escape(&parked.detail),
            escape(&parked.rule),
            parked.expires_at,
            id = parked.id,
        );
        let write = move || drop(io::stderr().write_all(text.as_bytes()));
        if let Err(error) = std::thread::Builder::new().name("notice".to_owned()).spawn(write) {
            tracing::warn!(%error, "nobody is told that a question waits");
        }
    })
}

fn overrides(args: &Args) -> Overrides {
    let mut overrides = Overrides {
        wall: args.wall,
        cpu: args.cpu,
        memory: args.memory,
        pids: args.pids,
        cpus: args.cpus,
        write_bytes: args.write_bytes,
        effects: args.effects,
        approval_timeout: args.approval_timeout,
        output_bytes: args.output_bytes,
        egress_bytes: args.egress_bytes,
        allow: args.allow.clone(),
        deny: args.deny.clone(),
        published: args.publish.clone(),
        host_ports: args.host_ports.clone(),
        private: args.private.clone(),
        resolver: args.resolver,
        read_only: args.read_only,
        views: args.views.clone(),
        profile: args.profile.clone(),
        launcher: args.launcher.map(|launcher| match launcher {
            LauncherName::Native => Launcher::Native,
            LauncherName::Bwrap => Launcher::Bwrap,
        }),
        best_effort: args.best_effort,
        ..Overrides::default()
    };
    for text in &args.environment {
        match split_variable(text) {
            (name, Some(value)) => overrides.set_env.push((name.to_owned(), value.to_owned())),
            (name, None) => overrides.allow_env.push(name.to_owned()),
        }
    }
    overrides
}

/// Tells the caller something while a run goes on.
fn say(text: &str) {
    eprintln!("tollgate: {}", escape(text));
}

/// The layers that a test asks to leave out. Anything but a test build refuses to run at all when asked.
fn without() -> Result<Vec<Layer>, Failure> {
    let Some(text) = std::env::var_os(WITHOUT_VARIABLE) else { return Ok(Vec::new()) };
    let text = text.to_string_lossy().into_owned();
    if !cfg!(feature = "test-switches") {
        return Err(refused(
            format!("{WITHOUT_VARIABLE} is set, and this is no test build"),
            "unset it: a layer of the jail is never left out",
        ));
    }
    let layer = |name: &str| {
        serde_json::from_value(serde_json::Value::String(name.to_owned()))
            .map_err(|_| refused(format!("{WITHOUT_VARIABLE}: there is no layer `{name}`"), ""))
    };
    text.split(',').filter(|name| !name.is_empty()).map(layer).collect()
}

/// A refusal of Tollgate's own, before there is a run.
fn refused(message: impl Into<String>, hint: impl Into<String>) -> Failure {
    Failure { status: outcome::ExitCode::NotDone.number(), ..Failure::new(message, hint) }
}

/// Whether the run did not do what was asked of Tollgate, so that its exit status says nothing of the program: an
/// error, which no wish for quiet keeps back.
fn ours(kind: OutcomeType) -> bool {
    matches!(kind, OutcomeType::CouldNotStart | OutcomeType::CouldNotApply)
}

/// One line on how the run ended, then what was refused and what to change.
fn summarise(report: &RunReport, talk: &mut impl Write) -> io::Result<()> {
    let record = &report.record;
    let Some(outcome) = &record.outcome else { return Ok(()) };
    let mut line = format!("tollgate: run {}: {}", record.id, outcome::summary(outcome));
    line.push_str(&changes_in_words(report));
    if record.effects.refused > 0 {
        line.push_str(&format!("; {} refused (`tollgate receipts {} --denied`)", record.effects.refused, record.id));
    }
    writeln!(talk, "{line}")?;
    if let Some(signal) = report.signal {
        writeln!(talk, "  note: {signal} came when the program was over; its changes were not interrupted")?;
    }
    for conflict in &report.changes.conflicts {
        writeln!(talk, "  conflict: {} {}", escape(&conflict.path.to_string_lossy()), escape(&conflict.reason))?;
    }
    if let Some(injected) = record.answered.faults_injected {
        writeln!(talk, "  faults: {injected} injected")?;
    }
    if record.answered.recording.is_some() {
        writeln!(talk, "  recorded: `tollgate run --replay {}` replays it", record.id)?;
    }
    if let Some(report) = &record.answered.replay {
        for line in super::recording::report_lines(report) {
            writeln!(talk, "  {}", escape(&line))?;
        }
    }
    for note in &report.notes {
        writeln!(talk, "  note: {}", escape(note))?;
    }
    let mut hosts: Vec<&str> = report.refusals.iter().filter_map(|refusal| refusal.host()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    if !hosts.is_empty() {
        let more = hosts.len().saturating_sub(HOSTS);
        let shown = escape(&hosts[..hosts.len() - more].join(", "));
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        writeln!(talk, "  refused hosts: {shown}{more}")?;
    }
    let failed = report.exit_status != 0 || outcome.kind != OutcomeType::Exited || !report.changes.held.is_empty();
    if !failed {
        // A program often goes on without what it was refused, and few print what a server answered.
        let of_network: Vec<&Refusal> = report.refusals.iter().filter(|refusal| refusal.host().is_some()).collect();
        return explain(&of_network, &record.id, talk);
    }
    for degraded in record.degraded.iter().filter(|degraded| !report.notes.contains(degraded)) {
        // The bracket says why, at length; whoever wants to know asks.
        let short = degraded.split_once(" (").map_or(degraded.as_str(), |(short, _)| short);
        writeln!(talk, "  degraded: {} (`tollgate inspect {}` says why)", escape(short), record.id)?;
    }
    explain(&report.refusals.iter().collect::<Vec<_>>(), &record.id, talk)
}

/// The first of these refusals, each with what to change.
fn explain(refusals: &[&Refusal], run: &RunId, talk: &mut impl Write) -> io::Result<()> {
    // What a program wanted of a host says more than that it asked for its name first.
    let says_more = |one: &Refusal, host: &str| {
        one.kind != Kind::NetResolve && one.host().is_some_and(|other| other.split(':').next() == Some(host))
    };
    let needless = |one: &Refusal| {
        one.kind == Kind::NetResolve
            && one.host().is_some_and(|host| refusals.iter().any(|other| says_more(other, host)))
    };
    let refusals: Vec<&Refusal> = refusals.iter().copied().filter(|one| !needless(one)).collect();
    for (place, refusal) in refusals.iter().take(EXPLAINED).enumerate() {
        // Many reasons begin with what they are about.
        let object = match refusal.reason.starts_with(refusal.kind.name()) {
            true => String::new(),
            false => format!("{} {}: ", refusal.kind, refusal.object),
        };
        writeln!(talk, "  refused by {}: {}{}", refusal.by, escape(&object), escape(&refusal.reason))?;
        // The same hint once, after the last that it is for.
        let again = refusals.get(place + 1).filter(|_| place + 1 < EXPLAINED);
        if !refusal.hint.is_empty() && again.is_none_or(|next| next.hint != refusal.hint) {
            writeln!(talk, "    hint: {}", escape(&refusal.hint))?;
        }
    }
    if refusals.len() > EXPLAINED {
        writeln!(talk, "  and {} more: `tollgate receipts {run} --denied`", refusals.len() - EXPLAINED)?;
    }
    Ok(())
}

fn changes_in_words(report: &RunReport) -> String {
    let (applied, held) = (report.changes.applied, report.changes.held.len());
    let plural = |count: usize| if count == 1 { "change" } else { "changes" };
    let id = &report.record.id;
    if report.record.mode == RunMode::Preflight {
        return format!("; nothing happened, everything is planned (`tollgate plan {id}`)");
    }
    match (applied, held) {
        (0, 0) if report.record.changes == ChangesState::Pending => {
            format!("; its changes are pending (`tollgate diff {id}`, then `tollgate apply {id}`)")
        }
        (0, 0) => String::new(),
        (applied, 0) => format!("; {applied} {} applied", plural(applied)),
        (0, held) => format!("; {held} {} held (`tollgate diff {id}`, then `tollgate apply {id}`)", plural(held)),
        (applied, held) => format!(
            "; {applied} {} applied, {held} held (`tollgate diff {id}`, then `tollgate apply {id}`)",
            plural(applied)
        ),
    }
}
