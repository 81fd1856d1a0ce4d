//! The workspace door: what a run changed, as effects.
//!
//! Each change becomes one effect and gets one receipt. The effects pass the chain together; those that nobody
//! refuses are applied as one batch when the last has arrived, and each then learns what became of the batch. A
//! refused change stays pending in the run's layer, with whatever cannot stand without it.
//!
//! The door itself holds back one kind of change: a link or file where tools look for a directory of settings, which
//! would smuggle a whole protected tree past rules that name what lies in it. See [`SETTINGS_DIRECTORIES`].

use crate::{
    chain::{Answer, BoxFuture, Chain, World},
    effect::{self, fs, Door, Effect, Kind, Resource, RoomId, RunId, Subject},
    ledger::record::ChangesState,
    room::{
        batch::{self, ApplyError, Batch, Conflict, IdShift},
        changes::{Change, ChangeKind, ChangeSet, NodeType, Skipped},
        path::{printable, spell, spelled},
    },
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::{oneshot, Notify};

/// Directories that tools read settings from which can run code.
///
/// Where one of these names becomes a link or a file, the settings come from somewhere else than the path that a
/// policy's rules name (`.git` as a file holds `gitdir: …`, gitrepository-layout(5)), so it needs a person's word.
/// `hooks` counts only directly in a `.git`. Compared without case, as some file systems do.
pub const SETTINGS_DIRECTORIES: &[&str] = &[".git", ".vscode", ".idea", ".claude", ".cursor", ".codex"];

const HINT_HELD: &str = "read it with `tollgate diff`, then `tollgate apply` it by its path, or `tollgate discard` it";

/// Whose word a change is applied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The run ended and its changes are applied under its policy.
    Policy,
    /// An operator named the run, and perhaps paths, to be applied.
    Operator,
}

/// Everything that applying a run's changes needs.
#[derive(Clone)]
pub struct Commit {
    /// Who acts.
    pub subject: Subject,
    /// The room, if the run is in one.
    pub room: Option<RoomId>,
    /// The run.
    pub run: RunId,
    /// The run's own directory.
    pub run_dir: Arc<OwnedFd>,
    /// The workspace's root.
    pub workspace: Arc<OwnedFd>,
    /// The run's layer or mirror.
    pub source: Arc<OwnedFd>,
    /// When the run started, in nanoseconds since the epoch.
    pub since_ns: i64,
    /// How ids are put back.
    pub shift: Option<IdShift>,
    /// Whose word it is.
    pub word: Word,
    /// Only these paths and what lies below them; none for all.
    pub select: Option<Vec<PathBuf>>,
}

/// A change that stays pending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Held {
    /// The path.
    #[serde(with = "spelled")]
    pub path: PathBuf,
    /// Who held it: a handler of the chain, or the door.
    pub decided_by: String,
    /// Why.
    pub reason: String,
    /// What to do.
    pub hint: String,
}

/// What became of a run's changes.
#[derive(Clone, Debug, Serialize)]
pub struct CommitReport {
    /// How many changes were applied.
    pub applied: usize,
    /// The changes that stay pending because somebody refused them.
    pub held: Vec<Held>,
    /// Paths that somebody else changed meanwhile; with any, nothing was applied.
    pub conflicts: Vec<Conflict>,
    /// What the run made that is never shipped.
    pub skipped: Vec<Skipped>,
    /// Where the changes stand.
    pub state: ChangesState,
    /// Why the batch failed, in one sentence with its object; none if it was applied.
    pub failure: Option<String>,
}

/// Passes a run's changes through the chain and applies those that nobody refused, all together.
///
/// The changes are a scan's, with [`batch::keep_pending`] applied. A failed batch is in the report, not an error: the
/// receipts say the same.
pub async fn commit(chain: &Chain, commit: Commit, set: ChangeSet) -> CommitReport {
    let ChangeSet { changes, skipped } = set;
    let (chosen, left): (Vec<Change>, Vec<Change>) = select(changes, commit.select.as_deref());
    let effects: Vec<Effect> =
        chosen.iter().map(|change| effect_of(change, &commit.subject, commit.room.as_ref(), commit.since_ns)).collect();
    let world = BatchWorld::new(&effects, &chosen, commit.word);

    let ask = |index: usize| {
        let (world, effect) = (&world, &effects[index]);
        async move {
            let answer = chain.perform(effect, world).await;
            world.settled(index);
            answer
        }
    };
    let asking = futures_util::future::join_all((0..effects.len()).map(ask));
    let applying = async {
        world.all_settled().await;
        let senders = world.take();
        let waiting: Vec<bool> = senders.iter().map(Option::is_some).collect();
        let held = consistent(&chosen, &waiting);
        let mut batch = Vec::new();
        let mut remaining: Vec<PathBuf> = left.iter().flat_map(paths_of).collect();
        for (change, held) in chosen.iter().zip(&held) {
            match held {
                None => batch.push(change.clone()),
                Some(_) => remaining.extend(paths_of(change)),
            }
        }
        let applied = batch.len();
        let outcome = run_batch(&commit, batch, remaining).await;
        for ((sender, change), held) in senders.into_iter().zip(&chosen).zip(&held) {
            let Some(sender) = sender else { continue };
            let answer = match (held, &outcome) {
                (Some(reason), _) => Answer::refused("workspace", reason.clone(), HINT_HELD),
                (None, Ok(())) => done(change),
                (None, Err(error)) => failed(change, error),
            };
            // A handler further out may have stopped waiting; its receipt says what it decided.
            let _ = sender.send(answer);
        }
        (outcome, applied)
    };
    let (answers, (outcome, applied)) = tokio::join!(asking, applying);

    let held: Vec<Held> = chosen
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| answer.decision == crate::chain::Decision::Refused)
        .map(|(change, answer)| Held {
            path: change.path.clone(),
            decided_by: answer.decided_by.to_string(),
            reason: answer.reason.clone(),
            hint: answer.hint.clone(),
        })
        .collect();
    let total = chosen.len() + left.len();
    let (conflicts, failure) = match outcome {
        Ok(()) => (Vec::new(), None),
        Err(error) => {
            let failure = Some(error.to_string());
            match error {
                ApplyError::Conflict { conflicts } => (conflicts, failure),
                ApplyError::Stage { .. }
                | ApplyError::Step { .. }
                | ApplyError::RollBack { .. }
                | ApplyError::Ours { .. }
                | ApplyError::Busy => (Vec::new(), failure),
            }
        }
    };
    let applied = if failure.is_some() { 0 } else { applied };
    let state = match (total, applied) {
        (0, _) => ChangesState::None,
        (total, applied) if applied == total => ChangesState::Applied,
        (_, 0) => ChangesState::Pending,
        (_, _) => ChangesState::Partial,
    };
    CommitReport { applied, held, conflicts, skipped, state, failure }
}

/// Passes changes through a chain that answers them all, for a plan. One that is not answered fails: nothing is done.
pub async fn plan(chain: &Chain, changes: &[Change], subject: &Subject, since_ns: i64) {
    /// A world that does nothing.
    struct Closed;
    impl World for Closed {
        fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
            let reason = format!("{} of `{}` was to be planned and not done", effect.kind, effect.resource);
            let answer = Answer::failed(reason, "this is a bug of Tollgate; please report it");
            Box::pin(std::future::ready(answer))
        }
    }
    let effects: Vec<Effect> = changes.iter().map(|change| effect_of(change, subject, None, since_ns)).collect();
    futures_util::future::join_all(effects.iter().map(|effect| chain.perform(effect, &Closed))).await;
}

async fn run_batch(commit: &Commit, changes: Vec<Change>, remaining: Vec<PathBuf>) -> Result<(), ApplyError> {
    if changes.is_empty() {
        // Nothing is applied, so everything stays pending as it is.
        return Ok(());
    }
    let commit = commit.clone();
    let work = tokio::task::spawn_blocking(move || {
        let batch = Batch {
            run: &commit.run,
            run_dir: &commit.run_dir,
            workspace: &commit.workspace,
            source: &commit.source,
            since_ns: commit.since_ns,
            shift: commit.shift,
            #[cfg(test)]
            stop: None,
        };
        batch::apply(&batch, &changes, &remaining).map(|_| ())
    });
    match work.await {
        Ok(outcome) => outcome,
        // The thread was stopped or panicked: the journal says what to do at the next start.
        Err(error) => Err(ApplyError::Ours { deed: "finish the batch", source: std::io::Error::other(error) }),
    }
}

/// The paths by which a change is known as pending.
pub(crate) fn paths_of(change: &Change) -> Vec<PathBuf> {
    match &change.kind {
        ChangeKind::Moved { from } => vec![from.clone(), change.path.clone()],
        ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => {
            vec![change.path.clone()]
        }
    }
}

/// The chosen changes with what they need: new directories above them, and the rest of their groups.
fn select(changes: Vec<Change>, select: Option<&[PathBuf]>) -> (Vec<Change>, Vec<Change>) {
    let Some(select) = select else { return (changes, Vec::new()) };
    let named =
        |change: &Change| paths_of(change).iter().any(|path| select.iter().any(|selected| path.starts_with(selected)));
    let groups: BTreeSet<u32> =
        changes.iter().filter(|change| named(change)).filter_map(|change| change.group).collect();
    let chosen: BTreeSet<PathBuf> = changes
        .iter()
        .filter(|change| named(change) || change.group.is_some_and(|group| groups.contains(&group)))
        .map(|change| change.path.clone())
        .collect();
    changes.into_iter().partition(|change| {
        chosen.contains(&change.path)
            || (becomes_directory(change)
                && chosen.range(change.path.clone()..).next().is_some_and(|below| below.starts_with(&change.path)))
    })
}

/// The changes that stay when these paths go, each with the rest of its group.
pub(crate) fn without(changes: Vec<Change>, gone: &[PathBuf]) -> Vec<Change> {
    let (chosen, mut left) = select(changes, Some(gone));
    // A new directory goes only when it is named, or when all that is new in it goes.
    let above = |change: &Change| !paths_of(change).iter().any(|path| gone.iter().any(|gone| path.starts_with(gone)));
    let needed: BTreeSet<PathBuf> = left.iter().map(|change| change.path.clone()).collect();
    left.extend(chosen.into_iter().filter(|change| {
        change.group.is_none()
            && above(change)
            && needed.range(change.path.clone()..).next().is_some_and(|below| below.starts_with(&change.path))
    }));
    left.sort_by(|one, other| one.path.cmp(&other.path));
    left
}

fn becomes_directory(change: &Change) -> bool {
    change.kind != ChangeKind::Attributes
        && change.after.as_ref().is_some_and(|after| after.kind == NodeType::Directory)
}

/// What a change asks of the world, of a run that started at this time.
pub(crate) fn effect_of(change: &Change, subject: &Subject, room: Option<&RoomId>, since_ns: i64) -> Effect {
    let path = spell(&change.path);
    let unchanged = Some(fs::Expect::Unchanged { since_ns });
    let mode = change.after.as_ref().map_or(0, |after| after.mode);
    let (kind, resource, request) = match &change.kind {
        ChangeKind::Deleted => (Kind::FsDelete, path.clone(), fs::Request::Delete { path, expect: unchanged }),
        ChangeKind::Moved { from } => {
            let from = spell(from);
            (Kind::FsMove, from.clone(), fs::Request::Move { path: from, to: path })
        }
        ChangeKind::Attributes => (
            Kind::FsWrite,
            path.clone(),
            fs::Request::Write { path, node: fs::Node::Attributes { mode }, expect: unchanged },
        ),
        ChangeKind::Created | ChangeKind::Modified => {
            let node = match &change.after {
                Some(after) => match (after.kind, after.digest) {
                    (NodeType::File, Some(digest)) => fs::Node::File { digest, bytes: after.size, mode },
                    (NodeType::Directory, _) => fs::Node::Directory { mode },
                    (NodeType::Link, _) => fs::Node::Link { target: after.target.clone().unwrap_or_default() },
                    (NodeType::File, None) | (NodeType::Special, _) => fs::Node::Attributes { mode },
                },
                None => fs::Node::Attributes { mode },
            };
            let expect = if change.kind == ChangeKind::Created { Some(fs::Expect::Absent) } else { unchanged };
            (Kind::FsWrite, path.clone(), fs::Request::Write { path, node, expect })
        }
    };
    Effect {
        kind,
        resource: Resource::Workspace { path: resource },
        subject: subject.clone(),
        room: room.cloned(),
        door: Door::Workspace,
        request: effect::Request::Fs(request),
    }
}

/// What the world says of a change that is in the workspace.
pub(crate) fn done(change: &Change) -> Answer {
    let bytes = match (&change.kind, &change.after) {
        (ChangeKind::Created | ChangeKind::Modified, Some(after)) if after.kind == NodeType::File => after.size,
        _ => 0,
    };
    let mut answer = Answer::done(serde_json::json!({ "path": spell(&change.path) }), bytes);
    answer.digest = change.after.as_ref().and_then(|after| after.digest);
    answer
}

fn failed(change: &Change, error: &ApplyError) -> Answer {
    let hint = match error {
        ApplyError::Conflict { .. } => {
            "compare with `tollgate diff`; apply what is not in conflict by naming its paths to `tollgate apply`, or `tollgate discard` the run's changes"
        }
        ApplyError::Stage { .. } | ApplyError::Step { .. } | ApplyError::Ours { .. } => {
            "make room or give the rights that are missing, then `tollgate apply` the run's changes"
        }
        ApplyError::RollBack { .. } | ApplyError::Busy => "`tollgate apply` the run's changes again",
    };
    Answer::failed(format!("`{}` was not applied: {error}", printable(&change.path)), hint)
}

/// Whether a change puts a link or file where tools expect a directory of settings.
///
/// See [`SETTINGS_DIRECTORIES`].
pub fn shadows_settings(change: &Change) -> bool {
    let leaf = change.after.as_ref().is_some_and(|after| matches!(after.kind, NodeType::File | NodeType::Link));
    if !leaf || change.kind == ChangeKind::Attributes {
        return false;
    }
    let is = |part: &std::ffi::OsStr, name: &str| part.eq_ignore_ascii_case(name);
    let Some(last) = change.path.file_name() else { return false };
    let parent = change.path.parent().and_then(Path::file_name);
    SETTINGS_DIRECTORIES.iter().any(|name| is(last, name))
        || (is(last, "hooks") && parent.is_some_and(|parent| is(parent, ".git")))
}

/// Which changes must wait, and why: those refused, and those that cannot stand without or would stand for a refused
/// one.
///
/// A group is all or nothing. Nothing lands below a directory that does not. A new directory that holds only held
/// changes is not made.
fn consistent(changes: &[Change], allowed: &[bool]) -> Vec<Option<String>> {
    let mut held: Vec<Option<String>> =
        allowed.iter().map(|allowed| if *allowed { None } else { Some("held: it was refused".to_owned()) }).collect();
    let directories: HashMap<&Path, usize> = changes
        .iter()
        .enumerate()
        .filter(|(_, change)| becomes_directory(change))
        .map(|(index, change)| (change.path.as_path(), index))
        .collect();
    loop {
        let before = held.iter().filter(|held| held.is_some()).count();
        let mut groups: BTreeMap<u32, &Path> = BTreeMap::new();
        for (change, held) in changes.iter().zip(&held) {
            if let (Some(group), Some(_)) = (change.group, held) {
                groups.entry(group).or_insert(&change.path);
            }
        }
        // How many changes below each new directory would land, and how many would not.
        let mut below: HashMap<usize, (usize, usize)> = HashMap::new();
        for (index, change) in changes.iter().enumerate() {
            if held[index].is_none() {
                if let Some(cause) = change.group.and_then(|group| groups.get(&group)) {
                    held[index] = Some(format!(
                        "held with `{}`: a directory goes or moves whole or not at all",
                        printable(cause)
                    ));
                }
            }
            for ancestor in change.path.ancestors().skip(1) {
                let Some(&directory) = directories.get(ancestor) else { continue };
                if held[index].is_none() && held[directory].is_some() {
                    held[index] = Some(format!("held with its directory `{}`", printable(ancestor)));
                }
            }
            let leaf = !becomes_directory(change);
            for ancestor in change.path.ancestors().skip(1) {
                let Some(&directory) = directories.get(ancestor) else { continue };
                let (lands, waits) = below.entry(directory).or_default();
                match (&held[index], leaf) {
                    (Some(_), _) => *waits += 1,
                    (None, true) => *lands += 1,
                    (None, false) => {}
                }
            }
        }
        for (directory, (lands, waits)) in below {
            if lands == 0 && waits > 0 && held[directory].is_none() && changes[directory].kind == ChangeKind::Created {
                held[directory] = Some("held: everything in it is held".to_owned());
            }
        }
        if held.iter().filter(|held| held.is_some()).count() == before {
            return held;
        }
    }
}

/// The world of one commit: waits until every effect has been decided, then answers with what became of the batch.
pub(super) struct BatchWorld {
    index: HashMap<(Kind, Resource), usize>,
    shadowing: Vec<bool>,
    state: Mutex<Arrivals>,
    all: Notify,
}

struct Arrivals {
    senders: Vec<Option<oneshot::Sender<Answer>>>,
    settled: Vec<bool>,
    open: usize,
}

impl BatchWorld {
    pub(super) fn new(effects: &[Effect], changes: &[Change], word: Word) -> BatchWorld {
        BatchWorld {
            index: effects
                .iter()
                .enumerate()
                .map(|(index, effect)| ((effect.kind, effect.resource.clone()), index))
                .collect(),
            shadowing: changes.iter().map(|change| word == Word::Policy && shadows_settings(change)).collect(),
            state: Mutex::new(Arrivals {
                senders: effects.iter().map(|_| None).collect(),
                settled: vec![false; effects.len()],
                open: effects.len(),
            }),
            all: Notify::new(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, Arrivals> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An effect waits for the batch, or its answer came without it.
    pub(super) fn settled(&self, index: usize) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.settled[index], true) {
            state.open -= 1;
        }
        if state.open == 0 {
            self.all.notify_one();
        }
    }

    pub(super) async fn all_settled(&self) {
        while self.state().open > 0 {
            self.all.notified().await;
        }
    }

    pub(super) fn take(&self) -> Vec<Option<oneshot::Sender<Answer>>> {
        std::mem::take(&mut self.state().senders)
    }
}

impl World for BatchWorld {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let Some(&index) = self.index.get(&(effect.kind, effect.resource.clone())) else {
                return Answer::failed(
                    format!("{} on `{}` is no change of this run", effect.kind, effect.resource),
                    "this is a bug of Tollgate; please report it",
                );
            };
            if self.shadowing[index] {
                return Answer::refused(
                    "workspace",
                    format!(
                        "`{}` would put a link or file where tools look for a directory of settings",
                        crate::room::path::escape_controls(&effect.resource.to_string())
                    ),
                    HINT_HELD,
                );
            }
            let (sender, receiver) = oneshot::channel();
            match self.state().senders.get_mut(index) {
                Some(place) if place.is_none() => *place = Some(sender),
                Some(_) | None => {
                    return Answer::failed(
                        "the effect came twice or too late",
                        "this is a bug of Tollgate; please report it",
                    )
                }
            }
            self.settled(index);
            receiver.await.unwrap_or_else(|_| {
                Answer::failed("the batch ended without an answer", "`tollgate apply` the run's changes again")
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{Decision, Handler, Next},
        room::{
            changes::scan,
            testing::{tree_state, Fixture, Inodes},
        },
    };

    /// Refuses paths below `.git/` and remembers every answer that passes.
    #[derive(Default)]
    struct Guard {
        receipts: Mutex<Vec<(String, Decision)>>,
    }

    impl Handler for Guard {
        fn name(&self) -> &'static str {
            "guard"
        }

        fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
            Box::pin(async move {
                let path = effect.resource.to_string();
                let answer = if path.split('/').any(|part| part == ".git") && path != ".git" {
                    Answer::refused("guard", format!("`{path}` is protected"), "ask")
                } else {
                    next.run(effect).await
                };
                self.receipts.lock().unwrap().push((path, answer.decision));
                answer
            })
        }
    }

    fn commit_of(fixture: &Fixture, word: Word, select: Option<Vec<PathBuf>>) -> Commit {
        Commit {
            subject: Subject { uid: 1000, run: Some(fixture.run.clone()), agent: None },
            room: None,
            run: fixture.run.clone(),
            run_dir: Arc::new(fixture.run_dir.try_clone().unwrap()),
            workspace: Arc::new(fixture.workspace.try_clone().unwrap()),
            source: Arc::new(fixture.upper.try_clone().unwrap()),
            since_ns: fixture.since_ns,
            shift: None,
            word,
            select,
        }
    }

    fn run(fixture: &Fixture, chain: &Chain, word: Word, select: Option<Vec<PathBuf>>) -> CommitReport {
        let set = batch::keep_pending(&fixture.run_dir, scan(&fixture.upper, &fixture.workspace).unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(commit(chain, commit_of(fixture, word, select), set))
    }

    fn guarded() -> (Arc<Guard>, Chain) {
        let guard = Arc::new(Guard::default());
        let chain = Chain::new(vec![guard.clone()]);
        (guard, chain)
    }

    fn open() -> Chain {
        Chain::new(Vec::new())
    }

    #[test]
    fn protected_changes_wait_while_the_others_land_and_each_has_one_receipt() {
        let fixture = Fixture::new().started();
        let upper = fixture.upper_path();
        std::fs::create_dir_all(upper.join(".git/hooks")).unwrap();
        std::fs::write(upper.join(".git/hooks/post-commit"), "evil").unwrap();
        std::fs::create_dir_all(upper.join("src")).unwrap();
        std::fs::write(upper.join("src/a"), "a").unwrap();
        let (guard, chain) = guarded();
        let report = run(&fixture, &chain, Word::Policy, None);
        assert_eq!(report.state, ChangesState::Partial, "{report:?}");
        assert!(fixture.workspace_path().join("src/a").exists());
        assert!(!fixture.workspace_path().join(".git").exists(), "a directory for held files only is not made");
        assert_eq!(report.applied, 2);
        assert_eq!(report.held.len(), 3);
        let receipts = guard.receipts.lock().unwrap();
        assert_eq!(receipts.len(), 5);
        for (path, decision) in receipts.iter() {
            let expected = if path.starts_with(".git") { Decision::Refused } else { Decision::Allowed };
            assert_eq!(*decision, expected, "{path}");
        }
        drop(receipts);
        let report = run(&fixture, &open(), Word::Operator, None);
        assert_eq!(report.state, ChangesState::Applied, "{report:?}");
        assert!(fixture.workspace_path().join(".git/hooks/post-commit").exists());
    }

    #[test]
    fn a_directory_with_something_protected_in_it_is_not_deleted() {
        let fixture = Fixture::new();
        std::fs::create_dir_all(fixture.workspace_path().join("sub/.git")).unwrap();
        std::fs::write(fixture.workspace_path().join("sub/.git/config"), "c").unwrap();
        std::fs::write(fixture.workspace_path().join("sub/a"), "a").unwrap();
        std::fs::write(fixture.workspace_path().join("b"), "b").unwrap();
        let fixture = fixture.started();
        fixture.whiteout("sub");
        fixture.whiteout("b");
        let before = tree_state(&fixture.workspace_path().join("sub"), Inodes::Compared);
        let (_, chain) = guarded();
        let report = run(&fixture, &chain, Word::Policy, None);
        assert_eq!(tree_state(&fixture.workspace_path().join("sub"), Inodes::Compared), before);
        assert!(!fixture.workspace_path().join("b").exists());
        assert!(report.held.iter().any(|held| held.path == Path::new("sub/a") && held.reason.contains("sub")));
    }

    #[test]
    fn a_link_or_file_in_place_of_a_settings_directory_waits_for_a_person() {
        for name in [".git", "deep/.vscode", ".GIT", ".git/hooks"] {
            for link in [true, false] {
                let fixture = Fixture::new().started();
                let at = fixture.upper_path().join(name);
                std::fs::create_dir_all(at.parent().unwrap()).unwrap();
                match link {
                    true => std::os::unix::fs::symlink("evil", &at).unwrap(),
                    false => std::fs::write(&at, "gitdir: evil").unwrap(),
                }
                let report = run(&fixture, &open(), Word::Policy, None);
                assert_eq!(report.applied, 0, "{name}");
                assert!(std::fs::symlink_metadata(fixture.workspace_path().join(name)).is_err(), "{name}");
                assert!(report.held.iter().any(|held| held.path == Path::new(name)), "{name}: {report:?}");
                let report = run(&fixture, &open(), Word::Operator, Some(vec![PathBuf::from(name)]));
                assert_eq!(report.failure, None);
                assert!(std::fs::symlink_metadata(fixture.workspace_path().join(name)).is_ok(), "{name}");
            }
        }
    }

    #[test]
    fn a_conflict_fails_every_effect_and_names_the_path() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("x"), "old").unwrap();
        let fixture = fixture.started();
        std::fs::write(fixture.upper_path().join("x"), "run").unwrap();
        std::fs::write(fixture.upper_path().join("y"), "run").unwrap();
        std::fs::write(fixture.workspace_path().join("x"), "host").unwrap();
        let (guard, chain) = guarded();
        let report = run(&fixture, &chain, Word::Policy, None);
        assert_eq!(report.state, ChangesState::Pending);
        assert_eq!(report.conflicts.len(), 1);
        assert_eq!(report.conflicts[0].path, Path::new("x"));
        assert!(!fixture.workspace_path().join("y").exists());
        assert_eq!(std::fs::read(fixture.workspace_path().join("x")).unwrap(), b"host");
        assert!(guard.receipts.lock().unwrap().iter().all(|(_, decision)| *decision == Decision::Failed));
    }

    #[test]
    fn one_of_three_changes_lands_when_one_is_named() {
        let fixture = Fixture::new().started();
        for name in ["a", "b", "new/c"] {
            let at = fixture.upper_path().join(name);
            std::fs::create_dir_all(at.parent().unwrap()).unwrap();
            std::fs::write(at, name).unwrap();
        }
        let report = run(&fixture, &open(), Word::Operator, Some(vec![PathBuf::from("new/c")]));
        assert_eq!(report.state, ChangesState::Partial);
        assert!(fixture.workspace_path().join("new/c").exists());
        assert!(!fixture.workspace_path().join("a").exists());
        let report = run(&fixture, &open(), Word::Operator, None);
        assert_eq!((report.state, report.applied), (ChangesState::Applied, 2));
    }

    #[test]
    fn nothing_to_do_is_no_batch() {
        let fixture = Fixture::new().started();
        assert_eq!(run(&fixture, &open(), Word::Policy, None).state, ChangesState::None);
        assert!(!fixture.run_path().join("before").exists());
    }
}
