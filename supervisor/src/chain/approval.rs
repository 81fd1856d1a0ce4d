//! Approval: does a person agree?
//!
//! Admission marks an effect that a rule asks about, and this step, the innermost, parks it until somebody decides at
//! the control door, the time is up, whoever asked goes away, or the run ends. Only the asking call waits. Nothing
//! else is parked: an effect without a question passes as if this step were not there.
//!
//! What it refuses: at once, whatever nobody is there to decide, and what a run changed in its workspace, which is
//! held for `tollgate apply` and asked about apart. A word is bound to the digest of the exact effect; only a saved
//! rule is about an object, and it never reaches an effect that a policy denies, which admission refuses further out.

use super::{Answer, BoxFuture, Handler, Next, Question};
use crate::{
    effect::{fs, path::shell_word, Digest, Door, Effect, Kind, Request, Resource, RunId},
    ledger::{self, consent::Scope, Ledger, Timestamp},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

const NAME: &str = "approval";

/// How long a question waits where nobody says otherwise.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Whether anybody is there to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attendance {
    /// Nobody: what would have to be asked is refused at once.
    Nobody,
    /// Somebody, who has this long for each question.
    Somebody {
        /// From when the effect is parked until it is refused as timed out.
        limit: Duration,
    },
}

/// What a person says about a parked effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    /// This effect, this time.
    Once,
    /// This exact effect, as often as the run asks.
    Run,
    /// This kind on this object, for this user in this workspace, in this run and later ones, until it is revoked.
    Always,
    /// No.
    Deny,
}

/// An effect that waits for a person, as the control door shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// The question's name: the run's id, `.q`, and a number from 1.
    pub id: String,
    /// The run.
    pub run: RunId,
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub resource: Resource,
    /// What it would do to it, in a few words.
    pub detail: String,
    /// The digest that the word is bound to.
    pub digest: Digest,
    /// The rule that asks.
    pub rule: String,
    /// The user who started the run.
    pub uid: u32,
    /// The run's workspace.
    pub workspace: String,
    /// When it was first asked.
    pub asked_at: String,
    /// When the last of those who wait is refused as timed out.
    pub expires_at: String,
    /// How many equal calls wait for this word.
    pub waiting: usize,
}

/// What a word did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// The question's name.
    pub id: String,
    /// The word.
    pub word: Word,
    /// What it covers and for how long, in one sentence.
    pub covers: String,
    /// How many calls go on with it.
    pub released: usize,
    /// The saved rule's number.
    pub rule: Option<i64>,
}

/// Why a word did nothing.
#[derive(Debug, thiserror::Error)]
pub enum DecideError {
    /// No such question.
    #[error(
        "no question `{0}` waits: it was answered, timed out or withdrawn; `tollgate approvals` lists those that do"
    )]
    NotWaiting(String),
    /// No rule can be about the object.
    #[error("no rule can be saved about {kind} {object}: only a path of the workspace outlives its run; use --once or --run")]
    NoRule {
        /// The kind.
        kind: Kind,
        /// The object.
        object: String,
    },
    /// The rule cannot be saved.
    #[error("the rule cannot be saved, so the question still waits: {0}")]
    Ledger(#[from] ledger::Error),
}

/// Whose questions a desk holds.
pub struct Owner {
    /// The run.
    pub run: RunId,
    /// The user who started it.
    pub uid: u32,
    /// Its workspace.
    pub workspace: String,
}

/// What is called when a new question waits.
pub type Notice = Arc<dyn Fn(&Parked) + Send + Sync>;

/// Where the questions of one run wait. The handler puts them there, the control door takes them off.
pub struct Desk {
    owner: Owner,
    attendance: Attendance,
    ledger: Ledger,
    notice: Notice,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    asked: u64,
    closed: bool,
    waiting: BTreeMap<u64, Entry>,
    /// Exact effects that were approved for the rest of the run.
    granted: HashSet<Digest>,
    /// What approved effects left in the run's layer, by [`outcome_digest`]: when the same leaves the layer, nobody is
    /// asked again.
    done: HashSet<Digest>,
}

struct Entry {
    parked: Parked,
    scope: Option<Scope>,
    tickets: u64,
    callers: VecDeque<(u64, oneshot::Sender<Told>)>,
}

/// What a caller hears.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    /// A person's word.
    Word(Word, u32),
    /// The run is over.
    Closed,
}

impl Desk {
    /// An empty desk.
    pub fn new(owner: Owner, attendance: Attendance, ledger: Ledger, notice: Notice) -> Desk {
        Desk { owner, attendance, ledger, notice, state: Mutex::default() }
    }

    /// What waits, the oldest first.
    pub fn parked(&self) -> Vec<Parked> {
        self.state().waiting.values().map(|entry| entry.parked.clone()).collect()
    }

    /// Gives a person's word on one question.
    ///
    /// # Errors
    ///
    /// [`DecideError`]; then nothing changed and the question, if it was there, still waits.
    pub fn decide(&self, id: &str, word: Word, by: u32) -> Result<Decided, DecideError> {
        let missing = || DecideError::NotWaiting(id.to_owned());
        let find = |state: &State| {
            state.waiting.iter().find(|(_, entry)| entry.parked.id == id).map(|(number, _)| *number).ok_or_else(missing)
        };
        let rule = match word {
            Word::Once | Word::Run | Word::Deny => None,
            Word::Always => {
                let (scope, parked) = {
                    let state = self.state();
                    let entry = &state.waiting[&find(&state)?];
                    (entry.scope.clone(), entry.parked.clone())
                };
                let scope = scope
                    .ok_or_else(|| DecideError::NoRule { kind: parked.kind, object: parked.resource.to_string() })?;
                // Saved before anybody goes on by it, and outside of the lock, since it waits for the disk.
                Some(self.ledger.save_approval_rule(&scope, &parked.id, by)?)
            }
        };
        let mut state = self.state();
        let number = find(&state)?;
        let entry = state.waiting.get_mut(&number).ok_or_else(missing)?;
        let digest = entry.parked.digest;
        let most = if word == Word::Once { 1 } else { usize::MAX };
        let mut released = 0;
        while released < most {
            let Some((_, caller)) = entry.callers.pop_front() else { break };
            // One who went away in this moment has not used the word.
            released += usize::from(caller.send(Told::Word(word, by)).is_ok());
        }
        entry.parked.waiting = entry.callers.len();
        if entry.callers.is_empty() {
            state.waiting.remove(&number);
        }
        if released == 0 && word == Word::Once {
            return Err(missing());
        }
        if word == Word::Run {
            state.granted.insert(digest);
        }
        Ok(Decided { id: id.to_owned(), word, covers: covers(word).to_owned(), released, rule })
    }

    /// The run is over: everything that waits is refused, and nothing waits from now on.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        for (_, entry) in std::mem::take(&mut state.waiting) {
            for (_, caller) in entry.callers {
                // One who is gone needs no answer.
                let _ = caller.send(Told::Closed);
            }
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who agreed already, if somebody did: for the rest of the run, or by a saved rule.
    fn agreed(&self, effect: &Effect) -> ledger::Result<Option<String>> {
        if self.state().granted.contains(&effect.digest()) {
            return Ok(Some("approved for this run".to_owned()));
        }
        if effect.door == Door::Workspace && self.state().done.contains(&outcome_digest(effect)) {
            return Ok(Some("approved when the program asked for it".to_owned()));
        }
        let Some(scope) = self.scope(effect) else { return Ok(None) };
        Ok(self.ledger.find_approval_rule(&scope)?.map(|rule| format!("approved by the saved rule {rule}")))
    }

    fn scope(&self, effect: &Effect) -> Option<Scope> {
        scope_of(effect, self.owner.uid, &self.owner.workspace)
    }

    /// Puts a question down, or joins an equal one; none when the run is over.
    fn park(self: &Arc<Desk>, effect: &Effect, question: &Question, limit: Duration) -> Option<Place> {
        let now = self.ledger.clock().now();
        let until = Timestamp(now.0.saturating_add(i64::try_from(limit.as_micros()).unwrap_or(i64::MAX)));
        let (sender, told) = oneshot::channel();
        let digest = effect.digest();
        let mut state = self.state();
        if state.closed {
            return None;
        }
        let equal = state.waiting.iter().find(|(_, entry)| entry.parked.digest == digest).map(|(number, _)| *number);
        let number = equal.unwrap_or(state.asked + 1);
        state.asked = state.asked.max(number);
        let entry = state.waiting.entry(number).or_insert_with(|| Entry {
            parked: Parked {
                id: format!("{}.q{number}", self.owner.run),
                run: self.owner.run.clone(),
                kind: effect.kind,
                resource: effect.resource.clone(),
                detail: detail(effect),
                digest,
                rule: question.origin.to_string(),
                uid: self.owner.uid,
                workspace: self.owner.workspace.clone(),
                asked_at: now.to_string(),
                expires_at: until.to_string(),
                waiting: 0,
            },
            scope: self.scope(effect),
            tickets: 0,
            callers: VecDeque::new(),
        });
        entry.tickets += 1;
        let ticket = entry.tickets;
        entry.callers.push_back((ticket, sender));
        entry.parked.waiting = entry.callers.len();
        entry.parked.expires_at = until.to_string();
        let parked = entry.parked.clone();
        drop(state);
        if equal.is_none() {
            (self.notice)(&parked);
        }
        Some(Place { desk: self.clone(), number, ticket, id: parked.id, told })
    }
}

/// A caller's place in the queue of a question. Dropped, the caller waits no more, and the question of the last one
/// is withdrawn.
struct Place {
    desk: Arc<Desk>,
    number: u64,
    ticket: u64,
    id: String,
    told: oneshot::Receiver<Told>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.desk.state();
        let Some(entry) = state.waiting.get_mut(&self.number) else { return };
        entry.callers.retain(|(ticket, _)| *ticket != self.ticket);
        entry.parked.waiting = entry.callers.len();
        if entry.callers.is_empty() {
            state.waiting.remove(&self.number);
        }
    }
}

/// What a rule about this effect would be about; none where the object does not outlive its run.
pub fn scope_of(effect: &Effect, uid: u32, workspace: &str) -> Option<Scope> {
    let Resource::Workspace { path } = &effect.resource else { return None };
    let to = match &effect.request {
        Request::Fs(fs::Request::Move { to, .. }) => Some(to.clone()),
        Request::Fs(
            fs::Request::Read { .. }
            | fs::Request::List { .. }
            | fs::Request::Write { .. }
            | fs::Request::Delete { .. },
        )
        | Request::Run(_)
        | Request::Jail(_)
        | Request::Program(_)
        | Request::Net(_)
        | Request::Http(_)
        | Request::Api(_) => None,
    };
    Some(Scope { kind: effect.kind, path: path.clone(), to, uid, workspace: workspace.to_owned() })
}

/// What each word covers, as it is told to whoever gave it.
pub fn covers(word: Word) -> &'static str {
    match word {
        Word::Once => "this effect, this one time",
        Word::Run => "exactly this effect, with this content, until the run ends",
        Word::Always => {
            "this kind on this path, with any content, for this user in this workspace, until it is revoked"
        }
        Word::Deny => "every call that waits with this question; the same asked again is asked about again",
    }
}

/// What an effect would do, in a few words for a person.
pub fn detail(effect: &Effect) -> String {
    match &effect.request {
        Request::Fs(fs::Request::Write { node, .. }) => match node {
            fs::Node::File { digest, bytes, mode } => {
                format!("file of {bytes} bytes, mode {mode:04o}, sha256 {digest}")
            }
            fs::Node::Directory { mode } => format!("directory, mode {mode:04o}"),
            fs::Node::Link { target } => format!("link to {target}"),
            fs::Node::Attributes { mode } => format!("only its attributes, mode {mode:04o}"),
        },
        Request::Fs(fs::Request::Move { to, .. }) => format!("to {to}"),
        Request::Fs(fs::Request::Delete { .. }) => "with all below it".to_owned(),
        Request::Fs(fs::Request::Read { offset, limit, .. }) => format!("{limit} bytes from {offset}"),
        Request::Program(call) => {
            call.to.as_ref().map_or_else(|| call.syscall.clone(), |to| format!("{} to {to}", call.syscall))
        }
        Request::Http(request) => match (&request.operation, request.body.bytes()) {
            (None, 0) => request.method.clone(),
            (None, bytes) => format!("{} with {bytes} bytes", request.method),
            (Some(operation), bytes) => format!("{} with {bytes} bytes, {operation}", request.method),
        },
        Request::Net(crate::effect::net::Request::Connect { transport, .. }) => transport.to_string(),
        Request::Net(crate::effect::net::Request::Accept { inside, from, .. }) => {
            format!("from {from} to port {inside}")
        }
        Request::Net(crate::effect::net::Request::Resolve { record, .. }) => record.clone(),
        Request::Fs(fs::Request::List { .. }) | Request::Jail(_) | Request::Api(_) => String::new(),
        Request::Run(crate::effect::run::Request::Start { command, .. }) => command.join(" "),
        Request::Run(crate::effect::run::Request::Cancel { .. } | crate::effect::run::Request::Eval { .. }) => {
            String::new()
        }
    }
}

/// The step of one run's chain.
pub struct Approval {
    desk: Arc<Desk>,
}

impl Approval {
    /// Parks at this desk.
    pub fn new(desk: Arc<Desk>) -> Approval {
        Approval { desk }
    }

    async fn ask(&self, effect: &Effect, question: &Question, next: Next<'_>) -> Answer {
        match self.desk.agreed(effect) {
            Ok(Some(by)) => return approved(next.run(effect).await, &by),
            Ok(None) => {}
            Err(error) => {
                let reason = format!("{}: the saved rules cannot be read: {error}", named(effect));
                return Answer::refused(NAME, reason, "`tollgate doctor` checks the state directory");
            }
        }
        let limit = match (effect.door, self.desk.attendance) {
            (Door::Api | Door::Program | Door::Network, Attendance::Somebody { limit }) => limit,
            (Door::Api | Door::Program | Door::Network, Attendance::Nobody) => return nobody(effect, question),
            // A batch lands whole: it does not wait for a person while the run has ended.
            (Door::Workspace | Door::Jail | Door::Control, _) => return unanswered(effect, question),
        };
        let began = Instant::now();
        let Some(mut place) = self.desk.park(effect, question, limit) else { return over(effect) };
        let asker = next.asker;
        let told = tokio::select! {
            // A word that was given counts, also in the moment in which the time is up.
            biased;
            told = &mut place.told => Some(told.unwrap_or(Told::Closed)),
            () = Next::asker_gone(asker) => {
                next.note_waiting(began.elapsed());
                return withdrawn(effect, &place.id);
            }
            () = tokio::time::sleep(limit) => None,
        };
        next.note_waiting(began.elapsed());
        let id = place.id.clone();
        drop(place);
        match told {
            Some(Told::Word(Word::Deny, by)) => denied(effect, &id, by),
            Some(Told::Word(word @ (Word::Once | Word::Run | Word::Always), by)) => {
                let how = match word {
                    Word::Once => "once",
                    Word::Run => "for this run",
                    Word::Always | Word::Deny => "always",
                };
                let answer = next.run(effect).await;
                if answer.is_success() {
                    self.desk.state().done.insert(outcome_digest(effect));
                }
                approved(answer, &format!("approved {how} by user {by} ({id})"))
            }
            Some(Told::Closed) => over(effect),
            None => timed_out(effect, &id, limit),
        }
    }
}

impl Handler for Approval {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, mut next: Next<'a>) -> BoxFuture<'a, Answer> {
        match next.take_question() {
            None => next.run(effect),
            Some(question) => Box::pin(async move { self.ask(effect, &question, next).await }),
        }
    }
}

/// The digest of an effect without what it expected to find: of what it leaves.
///
/// The program's own request and the batch that carries its result out of the layer differ in that alone.
fn outcome_digest(effect: &Effect) -> Digest {
    let mut effect = effect.clone();
    match &mut effect.request {
        Request::Fs(fs::Request::Write { expect, .. } | fs::Request::Delete { expect, .. }) => *expect = None,
        Request::Fs(fs::Request::Read { .. } | fs::Request::List { .. } | fs::Request::Move { .. })
        | Request::Run(_)
        | Request::Jail(_)
        | Request::Program(_)
        | Request::Net(_)
        | Request::Http(_)
        | Request::Api(_) => {}
    }
    effect.digest()
}

/// The kind and the object, for a sentence.
fn named(effect: &Effect) -> String {
    format!("{} {}", effect.kind, effect.resource)
}

/// The receipt of what a person agreed to says who that was.
fn approved(answer: Answer, by: &str) -> Answer {
    match answer.is_success() && answer.reason.is_empty() {
        true => Answer { reason: by.to_owned(), ..answer },
        false => answer,
    }
}

/// A rule asks, and this chain has nobody who answers: the effect is refused, and a change of the workspace is held.
pub(super) fn unanswered(effect: &Effect, question: &Question) -> Answer {
    let reason = format!("{}: a person must approve it, by the rule {}", named(effect), question.origin);
    if effect.door == Door::Api {
        return nobody(effect, question);
    }
    let run = effect.subject.run.as_ref().map_or("RUN", |run| run.0.as_str());
    Answer::refused(
        NAME,
        reason,
        format!(
            "look at it with `tollgate diff {run}`; approve it with `tollgate apply {run} {}`",
            shell_word(&effect.resource.to_string())
        ),
    )
}

fn nobody(effect: &Effect, question: &Question) -> Answer {
    Answer::refused(
        NAME,
        format!(
            "{}: a person must approve it, by the rule {}, and nobody is there to be asked",
            named(effect),
            question.origin
        ),
        "start the run with `--ask wait`, and answer with `tollgate approve` from another terminal; \
         or save a rule the next time, with `tollgate approve ID --always`",
    )
}

fn denied(effect: &Effect, id: &str, by: u32) -> Answer {
    Answer::refused(NAME, format!("{}: user {by} said no ({id})", named(effect)), "ask the person who decided")
}

fn timed_out(effect: &Effect, id: &str, limit: Duration) -> Answer {
    Answer::refused(
        NAME,
        format!("{}: timed out: nobody answered {id} within {} s", named(effect), limit.as_secs_f64()),
        "ask again when somebody is there, or give them longer with `--approval-timeout`",
    )
}

fn withdrawn(effect: &Effect, id: &str) -> Answer {
    Answer::refused(
        NAME,
        format!("{}: withdrawn: whoever asked went away before {id} was answered", named(effect)),
        "ask again, and wait for the answer",
    )
}

fn over(effect: &Effect) -> Answer {
    Answer::refused(NAME, format!("{}: the run ended before anybody answered", named(effect)), "run it again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{
            admission::{Admission, Home, Kinds, Layer, Origin, Paths, Patterns, Rule, Verdict},
            receipts::Receipts,
            testing::{ask, wait, FakeWorld},
            Asker, Chain, Decision,
        },
        effect::tests::sample,
        ledger::{consent::WhichRules, tests::Fixture, ReceiptQuery},
    };
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    const LONG: Attendance = Attendance::Somebody { limit: Duration::from_secs(60) };

    fn write(path: &str, bytes: u64) -> Effect {
        let node = fs::Node::File { digest: Digest::of(path.as_bytes()), bytes, mode: 0o644 };
        Effect {
            resource: Resource::Workspace { path: path.to_owned() },
            request: Request::Fs(fs::Request::Write { path: path.to_owned(), node, expect: None }),
            door: Door::Api,
            ..sample(Kind::FsWrite)
        }
    }

    fn asking(kind: Kind, verdicts: &[(Verdict, &str)]) -> Admission {
        let rules = verdicts.iter().map(|(verdict, pattern)| Rule {
            verdict: *verdict,
            kinds: Kinds::Only(vec![kind]),
            paths: Paths::Only(Patterns::new(vec![(*pattern).to_owned()]).unwrap()),
            target: Default::default(),
            origin: Origin { file: "p.toml".into(), line: 3, text: "rule".into() },
        });
        Admission::of(Layer::new("p.toml", Home::File, rules.collect()))
    }

    struct Bench {
        fixture: Fixture,
        desk: Arc<Desk>,
        world: FakeWorld,
        notices: Arc<AtomicUsize>,
    }

    impl Bench {
        fn new(attendance: Attendance) -> Bench {
            Bench::on(Fixture::new(), attendance, "/w")
        }

        fn on(fixture: Fixture, attendance: Attendance, workspace: &str) -> Bench {
            let owner = Owner { run: fixture.run.clone(), uid: 1000, workspace: workspace.to_owned() };
            let notices = Arc::new(AtomicUsize::new(0));
            let count = notices.clone();
            let notice = Arc::new(move |_: &Parked| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            let desk = Arc::new(Desk::new(owner, attendance, fixture.ledger.clone(), notice));
            Bench { fixture, desk, world: FakeWorld::default(), notices }
        }

        /// Receipts, an admission that asks about `.env*`, and the step.
        fn chain(&self) -> Chain {
            let admission =
                asking(Kind::FsWrite, &[(Verdict::Allow, "**"), (Verdict::Ask, ".env*"), (Verdict::Deny, ".envdeny")]);
            Chain::new(vec![
                Arc::new(Receipts::new(self.fixture.ledger.clone(), self.fixture.run.clone())),
                Arc::new(admission),
                Arc::new(Approval::new(self.desk.clone())),
            ])
        }

        async fn parked(&self, count: usize) -> Vec<Parked> {
            loop {
                let parked = self.desk.parked();
                if parked.iter().map(|parked| parked.waiting).sum::<usize>() == count {
                    return parked;
                }
                tokio::task::yield_now().await;
            }
        }

        fn done(&self) -> usize {
            self.world.done.lock().unwrap().len()
        }
    }

    #[test]
    fn what_was_approved_at_the_door_may_leave_the_layer_and_nothing_else() {
        let bench = Bench::new(LONG);
        let effect = write(".envx", 4);
        let leaves = |bytes| {
            let Effect { request, resource, .. } = write(".envx", bytes);
            let Request::Fs(fs::Request::Write { path, node, .. }) = request else { unreachable!() };
            let request = Request::Fs(fs::Request::Write { path, node, expect: Some(fs::Expect::Absent) });
            Effect { request, resource, door: Door::Workspace, ..effect.clone() }
        };
        let chain = bench.chain();
        let leave = |bytes| wait(chain.perform(&leaves(bytes), &bench.world));
        assert_eq!(leave(4).decided_by, NAME);
        let answer = wait(async {
            let (answer, ()) = tokio::join!(chain.perform(&effect, &bench.world), async {
                let parked = bench.parked(1).await;
                bench.desk.decide(&parked[0].id, Word::Once, 1000).unwrap();
            });
            answer
        });
        assert!(answer.is_success(), "{answer:?}");
        assert!(leave(4).is_success());
        let other = leave(5);
        assert_eq!((other.decision, other.decided_by), (Decision::Refused, NAME));
    }

    #[test]
    fn only_the_asking_call_waits_and_goes_on_with_the_real_result() {
        let bench = Bench::new(LONG);
        let chain = bench.chain();
        wait(async {
            let (asked, other) = (write(".envrc", 3), write("src/a", 4));
            let parked = chain.perform(&asked, &bench.world);
            let decides = async {
                let parked = bench.parked(1).await;
                assert_eq!(bench.done(), 0);
                assert!(chain.perform(&other, &bench.world).await.is_success(), "its sibling goes on");
                assert_eq!((parked[0].kind, parked[0].digest), (Kind::FsWrite, asked.digest()));
                assert!(parked[0].rule.contains("p.toml:3"), "{}", parked[0].rule);
                tokio::time::sleep(Duration::from_millis(20)).await;
                let decided = bench.desk.decide(&parked[0].id, Word::Once, 1000).unwrap();
                assert_eq!((decided.released, decided.rule), (1, None));
                parked[0].id.clone()
            };
            let (answer, id) = tokio::join!(parked, decides);
            assert!(answer.is_success());
            assert_eq!(answer.bytes, 3);
            let gone = bench.desk.decide(&id, Word::Once, 1000).unwrap_err();
            assert!(matches!(gone, DecideError::NotWaiting(_)), "{gone}");
        });
        let receipts: Vec<_> =
            bench.fixture.ledger.receipts(&ReceiptQuery::default()).unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(receipts.len(), 2);
        assert_eq!(receipts[1].decision, Decision::Allowed);
        assert_eq!(receipts[1].reason, format!("approved once by user 1000 ({}.q1)", bench.fixture.run));
        assert!(receipts[1].queued_us >= 20_000, "waiting is not deciding: {:?}", receipts[1]);
    }

    #[test]
    fn once_is_once_and_this_run_is_one_question_for_a_hundred_equal_calls() {
        let bench = Bench::new(LONG);
        let chain = bench.chain();
        wait(async {
            let effect = write(".envrc", 3);
            let all = futures_util::future::join_all((0..100).map(|_| chain.perform(&effect, &bench.world)));
            let decides = async {
                let parked = bench.parked(100).await;
                assert_eq!((parked.len(), bench.notices.load(Ordering::Relaxed)), (1, 1));
                bench.desk.decide(&parked[0].id, Word::Once, 1000).unwrap();
                let parked = bench.parked(99).await;
                tokio::task::yield_now().await;
                assert!(bench.done() <= 1, "once is one");
                bench.desk.decide(&parked[0].id, Word::Run, 1000).unwrap();
            };
            let (answers, ()) = tokio::join!(all, decides);
            assert!(answers.iter().all(Answer::is_success));
            assert!(chain.perform(&effect, &bench.world).await.is_success(), "and it is not asked about again");
            assert_eq!(bench.notices.load(Ordering::Relaxed), 1);

            let changed = write(".envrc", 4);
            let decides = async {
                let parked = bench.parked(1).await;
                bench.desk.decide(&parked[0].id, Word::Deny, 1000).unwrap();
            };
            let (answer, ()) = tokio::join!(chain.perform(&changed, &bench.world), decides);
            assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "approval"));
            assert!(answer.reason.contains("user 1000 said no"), "{}", answer.reason);
        });
    }

    #[test]
    fn a_saved_rule_holds_at_once_for_its_object_and_never_against_a_deny() {
        let bench = Bench::new(LONG);
        let chain = bench.chain();
        let rule = wait(async {
            let decides = async {
                let parked = bench.parked(1).await;
                bench.desk.decide(&parked[0].id, Word::Always, 1000).unwrap().rule.unwrap()
            };
            let effect = write(".envrc", 3);
            let (answer, rule) = tokio::join!(chain.perform(&effect, &bench.world), decides);
            assert!(answer.is_success());
            let answer = chain.perform(&write(".envrc", 4), &bench.world).await;
            assert!(answer.is_success() && answer.reason.contains("the saved rule"), "{answer:?}");
            rule
        });
        let fixture = bench.fixture;
        let denied =
            Scope { kind: Kind::FsWrite, path: ".envdeny".into(), to: None, uid: 1000, workspace: "/w".into() };
        fixture.ledger.save_approval_rule(&denied, "hand", 1000).unwrap();
        // Another run, with nobody there: the rule answers. In another workspace, or on another path, it does not.
        let bench = Bench::on(fixture, Attendance::Nobody, "/w");
        let perform = |bench: &Bench, path: &str| wait(bench.chain().perform(&write(path, 9), &bench.world));
        assert!(perform(&bench, ".envrc").is_success());
        assert_eq!(perform(&bench, ".envdeny").decided_by, "admission");
        let answer = perform(&bench, ".env");
        assert!(answer.reason.contains("nobody is there"), "{}", answer.reason);
        let mut elsewhere = Bench::on(bench.fixture, Attendance::Nobody, "/other");
        assert!(!perform(&elsewhere, ".envrc").is_success());
        elsewhere = Bench::on(elsewhere.fixture, Attendance::Nobody, "/w");
        elsewhere.fixture.ledger.revoke_approval_rule(rule).unwrap();
        assert!(!perform(&elsewhere, ".envrc").is_success(), "revoked");
        let ledger = &elsewhere.fixture.ledger;
        assert!(ledger.revoke_approval_rule(rule).is_err());
        assert_eq!(ledger.approval_rules(WhichRules::Held).unwrap().len(), 1);
        assert_eq!(ledger.approval_rules(WhichRules::All).unwrap().len(), 2);
    }

    #[test]
    fn a_rule_about_a_move_says_nothing_of_another_destination() {
        let moved = |to: &str| {
            let request = Request::Fs(fs::Request::Move { path: "a".into(), to: to.into() });
            let resource = Resource::Workspace { path: "a".into() };
            scope_of(&Effect { request, resource, ..sample(Kind::FsMove) }, 1, "/w").unwrap()
        };
        assert_ne!(moved(".envrc"), moved(".git/hooks/x"));
        assert_eq!(scope_of(&sample(Kind::RunCancel), 1, "/w"), None, "a run does not outlive itself");
    }

    #[test]
    fn nobody_there_means_refused_at_once_and_nothing_is_parked() {
        let bench = Bench::new(Attendance::Nobody);
        let answer = wait(bench.chain().perform(&write(".envrc", 1), &bench.world));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "approval"));
        assert!(answer.reason.contains("nobody is there") && answer.hint.contains("--ask wait"), "{answer:?}");
        assert_eq!((bench.done(), bench.desk.parked().len()), (0, 0));
    }

    #[test]
    fn time_that_is_up_is_a_refusal_that_says_so() {
        let bench = Bench::new(Attendance::Somebody { limit: Duration::from_millis(30) });
        let answer = wait(bench.chain().perform(&write(".envrc", 1), &bench.world));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "approval"));
        assert!(answer.reason.contains("timed out"), "{}", answer.reason);
        assert!(bench.desk.parked().is_empty());
    }

    #[test]
    fn whoever_goes_away_withdraws_the_question_with_a_receipt() {
        struct Leaves(Notify);
        impl Asker for Leaves {
            fn gone<'a>(&'a self) -> BoxFuture<'a, ()> {
                Box::pin(self.0.notified())
            }
        }
        let bench = Bench::new(LONG);
        let chain = bench.chain();
        let leaves = Leaves(Notify::new());
        wait(async {
            let effect = write(".envrc", 1);
            let goes = async {
                let id = bench.parked(1).await[0].id.clone();
                leaves.0.notify_one();
                id
            };
            let (answer, id) = tokio::join!(chain.perform_for(&effect, &bench.world, &leaves), goes);
            assert!(answer.reason.contains("withdrawn"), "{}", answer.reason);
            assert!(matches!(bench.desk.decide(&id, Word::Once, 0), Err(DecideError::NotWaiting(_))));
            // A task that is dropped leaves nothing behind either.
            let dropped = chain.perform(&effect, &bench.world);
            assert!(tokio::time::timeout(Duration::from_millis(20), dropped).await.is_err());
        });
        assert!(bench.desk.parked().is_empty());
        assert_eq!(bench.done(), 0);
        let mut receipts = bench.fixture.ledger.receipts(&ReceiptQuery::default()).unwrap();
        assert_eq!(receipts.next().unwrap().unwrap().decided_by, "approval");
    }

    #[test]
    fn a_run_that_ends_refuses_what_waits_and_parks_nothing_more() {
        let bench = Bench::new(LONG);
        let chain = bench.chain();
        wait(async {
            let effect = write(".envrc", 1);
            let ends = async {
                bench.parked(1).await;
                bench.desk.close();
            };
            let (answer, ()) = tokio::join!(chain.perform(&effect, &bench.world), ends);
            assert!(answer.reason.contains("the run ended"), "{}", answer.reason);
            let late = chain.perform(&effect, &bench.world).await;
            assert!(late.reason.contains("the run ended"), "{}", late.reason);
        });
        assert_eq!(bench.done(), 0);
    }

    #[test]
    fn a_change_of_the_workspace_is_held_and_not_parked() {
        let bench = Bench::new(LONG);
        let effect = Effect { door: Door::Workspace, ..write(".envrc", 1) };
        let answer = wait(bench.chain().perform(&effect, &bench.world));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "approval"));
        assert!(answer.hint.contains("tollgate apply"), "{}", answer.hint);
        let scope = scope_of(&effect, 1000, "/w").unwrap();
        bench.fixture.ledger.save_approval_rule(&scope, "q", 1000).unwrap();
        assert!(wait(bench.chain().perform(&effect, &bench.world)).is_success(), "unless a rule is there");
    }

    #[test]
    fn a_chain_without_the_step_does_not_reach_the_world_with_a_question() {
        let admission: Arc<dyn Handler> = Arc::new(asking(Kind::FsWrite, &[(Verdict::Ask, "**")]));
        let world = FakeWorld::default();
        for door in [Door::Api, Door::Workspace, Door::Control] {
            let effect = Effect { door, ..write("x", 1) };
            let answer = wait(ask(vec![admission.clone()], &effect, &world));
            assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "approval"));
        }
        assert!(world.done.lock().unwrap().is_empty());
    }
}
