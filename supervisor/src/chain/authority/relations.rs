//! Who may do what to whose place: a pure function over a value.
//!
//! A *place* is a room, or the room-less workspace of one run. A subject acts from its own place, and its authority is
//! what it has there and what its relations give it:
//!
//! - in its own place and in everything beneath it, at any depth: read, write, merge;
//! - over what is beneath, and never over its own place: admin, which is discarding and deleting;
//! - in a place that it takes part in: read, write;
//! - what a grant gives it, as long as whoever gave it holds as much themselves, it has not expired and is not revoked.
//!
//! Whatever is held over a place is held over everything beneath it. A place whose parents run in a circle is beneath
//! nothing: every question about it is answered with no. More relations never take authority away, as long as they
//! make no circle.

use crate::{
    effect::{RoomId, RunId},
    ledger::Timestamp,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// What can be done to a place. Each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// See what is in it.
    Read,
    /// Change what is in it, and make and write forks of it.
    Write,
    /// Take another's history into it.
    Merge,
    /// Discard or delete it, and put it elsewhere.
    Admin,
}

impl Action {
    /// Every action, the weakest first.
    pub const ALL: [Action; 4] = [Action::Read, Action::Write, Action::Merge, Action::Admin];
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Read => "read",
            Action::Write => "write",
            Action::Merge => "merge",
            Action::Admin => "admin",
        })
    }
}

/// Where something lies, and from where a subject acts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type", content = "id")]
pub enum Place {
    /// A room.
    Room(RoomId),
    /// A run without a room: its workspace, and the run itself.
    Run(RunId),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Room(id) => write!(f, "room {id}"),
            Place::Run(id) => write!(f, "run {id}"),
        }
    }
}

/// Who gave a grant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type", content = "place")]
pub enum Grantor {
    /// The person whose host it is.
    Operator,
    /// A subject, out of what it holds itself.
    Subject(Place),
}

/// The relation "this subject may do this to that object".
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Grant {
    /// Who may.
    pub to: Place,
    /// What, and all that is weaker.
    pub action: Action,
    /// On what, and all beneath it.
    pub on: Place,
    /// By whose word.
    pub by: Grantor,
    /// From when it is none any more; none for never.
    pub expires_at: Option<i64>,
}

/// Everything that authority is decided from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relations {
    /// What lies directly in what: nested rooms, forks, child runs.
    parents: BTreeMap<Place, Place>,
    /// Who takes part in what.
    participants: BTreeSet<(Place, Place)>,
    grants: BTreeSet<Grant>,
}

/// Why the answer is yes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ground {
    /// It is the subject's own place.
    Own,
    /// It lies beneath the subject's own place.
    Beneath,
    /// The subject takes part in this place, or in one above it.
    Participant(Place),
    /// A grant on this place, or on one above it.
    Granted(Grant),
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ground::Own => f.write_str("it is its own place"),
            Ground::Beneath => f.write_str("it lies beneath its own place"),
            Ground::Participant(place) => write!(f, "it takes part in {place}"),
            Ground::Granted(grant) => write!(f, "it was granted {} on {}", grant.action, grant.on),
        }
    }
}

/// Why the answer is no.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lack {
    /// No relation leads there.
    Nothing,
    /// What it holds is less.
    Only(Action),
    /// Nobody discards the place that they act from.
    OwnPlace,
    /// The place's parents run in a circle.
    Circle,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lack::Nothing => f.write_str("nothing relates it to that place"),
            Lack::Only(action) => write!(f, "it may {action} there and no more"),
            Lack::OwnPlace => f.write_str("nobody discards the place that they act from"),
            Lack::Circle => f.write_str("the parents of that place run in a circle"),
        }
    }
}

/// An answer with its reason.
pub type Ruling = Result<Ground, Lack>;

/// Why a relation was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelationError {
    /// The one who wants it may not.
    #[error("{by} may not {action} {on}: {lack}")]
    NotAllowed {
        /// Who.
        by: Place,
        /// What they lack.
        action: Action,
        /// On what.
        on: Place,
        /// Why they lack it.
        lack: Lack,
    },
    /// It would put a place beneath itself.
    #[error("{moved} cannot lie in {to}, which lies in {moved}")]
    Circle {
        /// What would be moved.
        moved: Place,
        /// Where.
        to: Place,
    },
    /// A grant that is over before it begins.
    #[error("a grant must end after it begins")]
    Expired,
    /// A grant that is not there.
    #[error("there is no such grant")]
    NoGrant,
}

/// May this subject, acting from its own place, do this to that place, now?
///
/// Pure, and bounded by the number of relations, whatever they are.
pub fn can(relations: &Relations, subject: &Place, action: Action, object: &Place, now: Timestamp) -> Ruling {
    let held = relations.valid_grants(now);
    relations.rule(subject, action, object, &held)
}

impl Relations {
    /// Adds a place that lies directly in another, as a fork, a nested room or a child run does from its making.
    ///
    /// # Errors
    ///
    /// [`RelationError::Circle`]. A place that has a parent is moved with [`Relations::reparent`].
    pub fn nest(&mut self, place: Place, parent: Place) -> Result<(), RelationError> {
        if self.parents.contains_key(&place) || self.is_at_or_above(&place, &parent) {
            return Err(RelationError::Circle { moved: place, to: parent });
        }
        self.parents.insert(place, parent);
        Ok(())
    }

    /// Puts a place into another, at a subject's word, which needs admin on what is moved and write where it goes.
    ///
    /// # Errors
    ///
    /// [`RelationError::NotAllowed`] and [`RelationError::Circle`]; then nothing changed.
    pub fn reparent(&mut self, by: &Place, moved: &Place, to: &Place, now: Timestamp) -> Result<(), RelationError> {
        for (action, on) in [(Action::Admin, moved), (Action::Write, to)] {
            can(self, by, action, on, now).map_err(|lack| RelationError::NotAllowed {
                by: by.clone(),
                action,
                on: on.clone(),
                lack,
            })?;
        }
        if self.is_at_or_above(moved, to) {
            return Err(RelationError::Circle { moved: moved.clone(), to: to.clone() });
        }
        self.parents.insert(moved.clone(), to.clone());
        Ok(())
    }

    /// Makes a subject take part in a place.
    pub fn admit(&mut self, member: Place, place: Place) {
        self.participants.insert((member, place));
    }

    /// Ends a subject's part in a place.
    pub fn dismiss(&mut self, member: &Place, place: &Place) {
        self.participants.remove(&(member.clone(), place.clone()));
    }

    /// Adds a grant.
    ///
    /// # Errors
    ///
    /// [`RelationError::NotAllowed`] when it is wider than what the grantor holds itself, and
    /// [`RelationError::Expired`].
    pub fn grant(&mut self, grant: Grant, now: Timestamp) -> Result<(), RelationError> {
        if grant.expires_at.is_some_and(|end| end <= now.0) {
            return Err(RelationError::Expired);
        }
        if let Grantor::Subject(by) = &grant.by {
            can(self, by, grant.action, &grant.on, now).map_err(|lack| RelationError::NotAllowed {
                by: by.clone(),
                action: grant.action,
                on: grant.on.clone(),
                lack,
            })?;
        }
        self.grants.insert(grant);
        Ok(())
    }

    /// Takes a grant back, with effect on the next question.
    ///
    /// # Errors
    ///
    /// [`RelationError::NoGrant`].
    pub fn revoke(&mut self, grant: &Grant) -> Result<(), RelationError> {
        match self.grants.remove(grant) {
            true => Ok(()),
            false => Err(RelationError::NoGrant),
        }
    }

    /// Relations as a store holds them, whatever they are: what does not hold water gives no authority.
    pub fn from_store(
        parents: impl IntoIterator<Item = (Place, Place)>,
        participants: impl IntoIterator<Item = (Place, Place)>,
        grants: impl IntoIterator<Item = Grant>,
    ) -> Relations {
        Relations {
            parents: parents.into_iter().collect(),
            participants: participants.into_iter().collect(),
            grants: grants.into_iter().collect(),
        }
    }

    /// The place and all above it, from the inside out; none when they run in a circle.
    fn upwards<'a>(&'a self, place: &'a Place) -> Option<Vec<&'a Place>> {
        let mut line = vec![place];
        let mut at = place;
        while let Some(parent) = self.parents.get(at) {
            // As many steps as there are places can only be a circle.
            if line.len() > self.parents.len() {
                return None;
            }
            line.push(parent);
            at = parent;
        }
        Some(line)
    }

    /// Whether a place is another or lies above it; also where the other's parents run in a circle, to be safe.
    fn is_at_or_above(&self, above: &Place, place: &Place) -> bool {
        self.upwards(place).is_none_or(|line| line.contains(&above))
    }

    fn rule(&self, subject: &Place, action: Action, object: &Place, held: &BTreeSet<&Grant>) -> Ruling {
        let line = self.upwards(object).ok_or(Lack::Circle)?;
        let own = subject == object;
        if own && action == Action::Admin {
            return Err(Lack::OwnPlace);
        }
        let mut best: Option<Action> = None;
        let mut try_ground = |holds: Action, ground: Ground| {
            best = best.max(Some(holds));
            (holds >= action).then_some(ground)
        };
        for place in line {
            if place == subject {
                let (holds, ground) = if own { (Action::Merge, Ground::Own) } else { (Action::Admin, Ground::Beneath) };
                if let Some(ground) = try_ground(holds, ground) {
                    return Ok(ground);
                }
            }
            if self.participants.contains(&(subject.clone(), place.clone())) {
                if let Some(ground) = try_ground(Action::Write, Ground::Participant(place.clone())) {
                    return Ok(ground);
                }
            }
            for grant in held.iter().filter(|grant| grant.to == *subject && grant.on == *place) {
                if let Some(ground) = try_ground(grant.action, Ground::Granted((*grant).clone())) {
                    return Ok(ground);
                }
            }
        }
        Err(best.map_or(Lack::Nothing, Lack::Only))
    }

    /// The grants that hold now. One that a subject gave holds as long as the subject could still give it, by grants
    /// that hold themselves: the least set that is closed under that, so that two who grant each other what neither
    /// has hold nothing.
    fn valid_grants(&self, now: Timestamp) -> BTreeSet<&Grant> {
        let mut open: Vec<&Grant> =
            self.grants.iter().filter(|grant| grant.expires_at.is_none_or(|end| end > now.0)).collect();
        let mut held: BTreeSet<&Grant> = BTreeSet::new();
        loop {
            let (now_held, still_open): (Vec<&Grant>, Vec<&Grant>) = open.iter().partition(|grant| match &grant.by {
                Grantor::Operator => true,
                Grantor::Subject(by) => self.rule(by, grant.action, &grant.on, &held).is_ok(),
            });
            if now_held.is_empty() {
                return held;
            }
            held.extend(now_held);
            open = still_open;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp(1_000);

    fn room(name: &str) -> Place {
        Place::Room(RoomId(name.to_owned()))
    }

    fn nth(index: usize) -> Place {
        match index % 4 {
            3 => Place::Run(RunId(format!("run{index}"))),
            _ => room(&format!("room{index}")),
        }
    }

    fn allowed(relations: &Relations, subject: &str, action: Action, object: &str) -> bool {
        can(relations, &room(subject), action, &room(object), NOW).is_ok()
    }

    fn grant(to: &str, action: Action, on: &str, by: Grantor) -> Grant {
        Grant { to: room(to), action, on: room(on), by, expires_at: None }
    }

    fn subject(name: &str) -> Grantor {
        Grantor::Subject(room(name))
    }

    /// own → fork → nested → fork of nested; `other` beside them.
    fn tree() -> Relations {
        let mut relations = Relations::default();
        for (place, parent) in [("fork", "own"), ("nested", "fork"), ("deep", "nested")] {
            relations.nest(room(place), room(parent)).unwrap();
        }
        relations
    }

    #[test]
    fn the_own_place_and_all_beneath_it_is_read_written_and_merged_at_any_depth() {
        let relations = tree();
        for object in ["own", "fork", "nested", "deep"] {
            for action in [Action::Read, Action::Write, Action::Merge] {
                assert!(allowed(&relations, "own", action, object), "{action} {object}");
            }
        }
        assert!(!allowed(&relations, "deep", Action::Read, "nested"), "nothing leads upwards");
        assert!(!allowed(&relations, "other", Action::Read, "own"));
    }

    #[test]
    fn what_is_beneath_may_be_discarded_and_the_own_place_never() {
        let mut relations = tree();
        assert!(allowed(&relations, "own", Action::Admin, "deep"));
        assert_eq!(can(&relations, &room("own"), Action::Admin, &room("own"), NOW), Err(Lack::OwnPlace));
        relations.grant(grant("own", Action::Admin, "own", Grantor::Operator), NOW).unwrap();
        assert!(!allowed(&relations, "own", Action::Admin, "own"), "not even by a grant");
    }

    #[test]
    fn whoever_may_only_write_writes_forks_and_does_not_merge() {
        let mut relations = tree();
        relations.admit(room("guest"), room("own"));
        assert!(allowed(&relations, "guest", Action::Write, "fork"));
        assert!(!allowed(&relations, "guest", Action::Merge, "own"));
        assert_eq!(can(&relations, &room("guest"), Action::Merge, &room("own"), NOW), Err(Lack::Only(Action::Write)));
    }

    #[test]
    fn taking_part_changes_the_answer_at_once() {
        let mut relations = tree();
        relations.admit(room("guest"), room("fork"));
        assert!(allowed(&relations, "guest", Action::Write, "fork"));
        assert!(!allowed(&relations, "guest", Action::Read, "own"));
        relations.dismiss(&room("guest"), &room("fork"));
        assert!(!allowed(&relations, "guest", Action::Read, "fork"));
    }

    #[test]
    fn a_grant_wider_than_the_grantors_own_is_refused() {
        let mut relations = tree();
        relations.admit(room("guest"), room("fork"));
        let wider = grant("friend", Action::Merge, "fork", subject("guest"));
        assert!(matches!(relations.grant(wider, NOW), Err(RelationError::NotAllowed { .. })));
        relations.grant(grant("friend", Action::Write, "fork", subject("guest")), NOW).unwrap();
        assert!(allowed(&relations, "friend", Action::Write, "deep"));
        assert!(!allowed(&relations, "friend", Action::Merge, "deep"));
    }

    #[test]
    fn a_grant_expires_is_revoked_and_falls_with_its_grantor() {
        let mut relations = tree();
        let short = Grant { expires_at: Some(2_000), ..grant("guest", Action::Read, "fork", Grantor::Operator) };
        relations.grant(short, NOW).unwrap();
        let at = |relations: &Relations, us| {
            can(relations, &room("guest"), Action::Read, &room("fork"), Timestamp(us)).is_ok()
        };
        assert!(at(&relations, 1_999) && !at(&relations, 2_000));
        let over = Grant { expires_at: Some(1_000), ..grant("guest", Action::Read, "fork", Grantor::Operator) };
        assert_eq!(relations.grant(over, NOW), Err(RelationError::Expired));

        relations.admit(room("middle"), room("own"));
        let passed_on = grant("guest", Action::Write, "own", subject("middle"));
        relations.grant(passed_on.clone(), NOW).unwrap();
        assert!(allowed(&relations, "guest", Action::Write, "own"));
        relations.dismiss(&room("middle"), &room("own"));
        assert!(!allowed(&relations, "guest", Action::Write, "own"), "its grantor lost it");
        relations.admit(room("middle"), room("own"));
        relations.revoke(&passed_on).unwrap();
        assert!(!allowed(&relations, "guest", Action::Write, "own"));
        assert_eq!(relations.revoke(&passed_on), Err(RelationError::NoGrant));
    }

    #[test]
    fn two_who_grant_each_other_what_neither_has_hold_nothing() {
        let circle = [
            grant("a", Action::Write, "own", subject("b")),
            grant("b", Action::Write, "own", subject("a")),
            grant("a", Action::Write, "own", subject("a")),
        ];
        let relations = Relations::from_store([], [], circle);
        assert!(!allowed(&relations, "a", Action::Read, "own"));
        assert!(!allowed(&relations, "b", Action::Read, "own"));
    }

    #[test]
    fn moving_needs_admin_on_what_is_moved() {
        let mut relations = tree();
        relations.admit(room("guest"), room("fork"));
        relations.nest(room("guests"), room("guest")).unwrap();
        let refused = relations.reparent(&room("guest"), &room("fork"), &room("guest"), NOW);
        assert!(matches!(refused, Err(RelationError::NotAllowed { action: Action::Admin, .. })), "{refused:?}");
        let refused = relations.reparent(&room("own"), &room("fork"), &room("guest"), NOW);
        assert!(matches!(refused, Err(RelationError::NotAllowed { action: Action::Write, .. })), "{refused:?}");
        relations.reparent(&room("own"), &room("deep"), &room("own"), NOW).unwrap();
        assert!(!allowed(&relations, "nested", Action::Read, "deep"));
    }

    #[test]
    fn a_circle_is_not_made_and_one_that_is_there_gives_a_bounded_no() {
        let mut relations = tree();
        let refused = relations.reparent(&room("own"), &room("fork"), &room("deep"), NOW);
        assert!(matches!(refused, Err(RelationError::Circle { .. })), "{refused:?}");
        assert!(relations.nest(room("own"), room("deep")).is_err());
        assert!(relations.nest(room("x"), room("x")).is_err());

        let circle = [("a", "b"), ("b", "c"), ("c", "a"), ("tail", "a")].map(|(place, up)| (room(place), room(up)));
        let relations = Relations::from_store(
            circle,
            [(room("a"), room("b"))],
            [grant("a", Action::Admin, "c", Grantor::Operator)],
        );
        for object in ["a", "b", "c", "tail"] {
            for subject in ["a", "b", "tail", "other"] {
                assert_eq!(can(&relations, &room(subject), Action::Read, &room(object), NOW), Err(Lack::Circle));
            }
        }
    }

    const PLACES: usize = 8;

    fn place() -> impl Strategy<Value = Place> {
        (0..PLACES).prop_map(nth)
    }

    fn action() -> impl Strategy<Value = Action> {
        prop::sample::select(Action::ALL.to_vec())
    }

    fn any_grant() -> impl Strategy<Value = Grant> {
        let by = prop_oneof![1 => Just(Grantor::Operator), 3 => place().prop_map(Grantor::Subject)];
        let end = prop_oneof![3 => Just(None), 1 => (500i64..2_000).prop_map(Some)];
        (place(), action(), place(), by, end).prop_map(|(to, action, on, by, expires_at)| Grant {
            to,
            action,
            on,
            by,
            expires_at,
        })
    }

    /// Parents that only lead to smaller numbers make no circle.
    fn forest() -> impl Strategy<Value = Vec<(Place, Place)>> {
        prop::collection::vec(prop::option::of(any::<prop::sample::Index>()), PLACES).prop_map(|parents| {
            let parent = |(child, parent): (usize, Option<prop::sample::Index>)| {
                (child > 0).then_some(())?;
                Some((nth(child), nth(parent?.index(child))))
            };
            parents.into_iter().enumerate().filter_map(parent).collect()
        })
    }

    fn members() -> impl Strategy<Value = Vec<(Place, Place)>> {
        prop::collection::vec((place(), place()), 0..5)
    }

    fn relations() -> impl Strategy<Value = Relations> {
        (forest(), members(), prop::collection::vec(any_grant(), 0..6))
            .prop_map(|(parents, members, grants)| Relations::from_store(parents, members, grants))
    }

    fn with_circles() -> impl Strategy<Value = Relations> {
        let parents = prop::collection::vec((place(), place()), 0..PLACES);
        (parents, members(), prop::collection::vec(any_grant(), 0..6))
            .prop_map(|(parents, members, grants)| Relations::from_store(parents, members, grants))
    }

    fn everything(relations: &Relations) -> BTreeSet<(Place, Action, Place)> {
        let places: Vec<Place> = (0..PLACES).map(nth).collect();
        let mut all = BTreeSet::new();
        for subject in &places {
            for object in &places {
                for action in Action::ALL {
                    if can(relations, subject, action, object, NOW).is_ok() {
                        all.insert((subject.clone(), action, object.clone()));
                    }
                }
            }
        }
        all
    }

    proptest! {
        /// AU2.
        #[test]
        fn holding_an_action_is_holding_every_weaker_one(relations in with_circles(), s in place(), o in place()) {
            let held: Vec<bool> = Action::ALL.map(|action| can(&relations, &s, action, &o, NOW).is_ok()).into();
            prop_assert!(held.windows(2).all(|pair| pair[0] || !pair[1]), "{held:?}");
        }

        /// AU8.
        #[test]
        fn without_a_relation_everything_but_the_own_place_is_denied(s in place(), a in action(), o in place()) {
            let ruling = can(&Relations::default(), &s, a, &o, NOW);
            prop_assert_eq!(ruling.is_ok(), s == o && a != Action::Admin);
        }

        /// AU9: whoever moves a place has no more than before.
        #[test]
        fn moving_a_place_gains_its_mover_nothing(
            mut relations in relations(), by in place(), moved in place(), to in place(),
        ) {
            let before = everything(&relations);
            if relations.reparent(&by, &moved, &to, NOW).is_ok() {
                prop_assert!(before.contains(&(by.clone(), Action::Admin, moved)));
                for held in everything(&relations).into_iter().filter(|(subject, ..)| *subject == by) {
                    prop_assert!(before.contains(&held), "{held:?} was gained");
                }
            }
        }

        /// AU10: bounded, and no place in or below a circle gives anybody anything.
        #[test]
        fn a_circle_gives_nothing(relations in with_circles(), s in place(), a in action(), o in place()) {
            let mut at = &o;
            let mut seen = BTreeSet::new();
            let circular = loop {
                if !seen.insert(at) {
                    break true;
                }
                match relations.parents.get(at) {
                    Some(parent) => at = parent,
                    None => break false,
                }
            };
            let ruling = can(&relations, &s, a, &o, NOW);
            prop_assert_eq!(circular, ruling == Err(Lack::Circle));
        }

        /// AU10: what the checked ways of changing relations make has no circle.
        #[test]
        fn no_sequence_of_moves_makes_a_circle(steps in prop::collection::vec((place(), place(), place()), 0..20)) {
            let mut relations = Relations::default();
            for (by, moved, to) in steps {
                let _ = relations.nest(moved.clone(), to.clone());
                let _ = relations.reparent(&by, &moved, &to, NOW);
            }
            for place in (0..PLACES).map(nth) {
                prop_assert!(relations.upwards(&place).is_some());
            }
        }

        /// AU13: one more relation takes nothing away.
        #[test]
        fn more_relations_allow_no_less(
            relations in relations(), member in (place(), place()), grant in any_grant(), nested in (place(), place()),
        ) {
            let before = everything(&relations);
            let mut more = relations;
            more.participants.insert(member);
            prop_assert!(everything(&more).is_superset(&before));
            more.grants.insert(grant);
            prop_assert!(everything(&more).is_superset(&before));
            let _ = more.nest(nested.0, nested.1);
            prop_assert!(everything(&more).is_superset(&before));
        }

        /// AU14: what is held over a place is held over all beneath it, but for discarding the place that one acts
        /// from.
        #[test]
        fn authority_carries_down_the_tree(relations in relations()) {
            let all = everything(&relations);
            for (child, parent) in &relations.parents {
                for (subject, action, _) in all.iter().filter(|(.., object)| object == parent) {
                    let own = subject == child && *action == Action::Admin;
                    prop_assert!(own || all.contains(&(subject.clone(), *action, child.clone())));
                }
            }
        }

        /// AU17: what a subject gives is never more than what it has, however grants are chained.
        #[test]
        fn a_grant_that_counts_is_within_its_grantors_own(relations in relations()) {
            for grant in relations.valid_grants(NOW) {
                if let Grantor::Subject(by) = &grant.by {
                    prop_assert!(can(&relations, by, grant.action, &grant.on, NOW).is_ok());
                }
            }
        }
    }
}
