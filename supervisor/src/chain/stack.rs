//! Stacks: chains as data, which compose.
//!
//! A stack is a list of elements. Its normal form has every element at its [`Rank`], one admission, one quota an id;
//! composing is concatenating and normalising, and can only narrow: admissions intersect, the smaller limit of a quota
//! holds, and no element is ever taken out. The empty stack is the identity of composing, so as data it refuses
//! nothing; therefore a stack without an admission cannot be built into a chain, and receipts are always built in.
//!
//! With `{fs, process}` and `{fs, network}` admitted and 10 and 5 bytes of quota `run`,
//! `[quota run 10, answering a, admit {fs, process}]` composed with `[admit {fs, network}, quota run 5, answering b]` is
//! `[receipts, admit {fs}, quota run 5, answering a, answering b]`, once receipts are in one of them.
//!
//! Two handlers are built into every chain and are no elements that could be missing: receipts, outermost, and
//! authority, directly after admission. No stack and no policy can take them out.

use super::{
    admission::Admission,
    authority::Authority,
    quota::{Amounts, Meters, Quota, SharedQuota, Unit},
    receipts::Receipts,
    Chain, Handler,
};
use crate::{effect::RunId, ledger::Ledger};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// The places of a chain, outermost first. The order of the variants is the order of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rank {
    /// Writes the receipt of every answer.
    Receipts,
    /// Whether the policies allow it.
    Admission,
    /// Whether the subject may do this to that object.
    Authority,
    /// Whether there is budget left.
    Quota,
    /// The guards: addresses, secrets, sensitive paths, commands.
    Containment,
    /// Record, replay, faults, preflight, in the order given.
    Answering,
    /// Whether a person agrees.
    Approval,
    /// Not an element: what the chain ends in.
    World,
}

/// One element of a stack.
#[derive(Clone, Debug, PartialEq)]
pub enum Element {
    /// The receipts handler.
    Receipts,
    /// What is allowed.
    Admission(Admission),
    /// A check of authority beside the one that is built in.
    Authority(Step),
    /// A quota that is counted in memory.
    Quota {
        /// Which meter: those who name one id share it.
        id: String,
        /// What is counted.
        unit: Unit,
        /// At most this much. 0 is none at all.
        limit: u64,
    },
    /// A quota that runs share, kept in the ledger.
    SharedQuota {
        /// Its id.
        id: String,
        /// Limits that are narrower than the quota's own.
        limits: Amounts,
    },
    /// A guard.
    Containment(Step),
    /// A handler that may answer in the world's place.
    Answering(Step),
    /// A parking place for what a person decides.
    Approval(Step),
}

impl Element {
    /// Its place in the chain.
    pub fn rank(&self) -> Rank {
        match self {
            Element::Receipts => Rank::Receipts,
            Element::Admission(_) => Rank::Admission,
            Element::Authority(_) => Rank::Authority,
            Element::Quota { .. } | Element::SharedQuota { .. } => Rank::Quota,
            Element::Containment(_) => Rank::Containment,
            Element::Answering(_) => Rank::Answering,
            Element::Approval(_) => Rank::Approval,
        }
    }
}

/// A handler as an element: made before the run, by the supervisor. Two are equal when they are the same one.
#[derive(Clone)]
pub struct Step(pub Arc<dyn Handler>);

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Step) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A chain as data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stack(pub Vec<Element>);

/// What a stack needs from around it to become a chain.
pub struct Wiring<'a> {
    /// Where receipts go.
    pub ledger: &'a Ledger,
    /// Whose effects pass.
    pub run: &'a RunId,
    /// The user on the host whose run it is.
    pub owner: u32,
    /// The quotas' meters.
    pub meters: &'a Meters,
}

/// A stack that cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Nothing says what is allowed.
    #[error("the stack has no admission, and what nothing allows is refused; add `Admission::nothing()` to mean that")]
    NoAdmission,
}

impl Stack {
    /// The normal form: elements by rank, receipts at most once, admissions intersected into one, the smallest limit
    /// of each quota and unit, in order of their ids, shared ones last. Elements of the other ranks keep their order; a guard that is there
    /// twice stays once, while an answering handler given twice answers twice.
    #[must_use]
    pub fn normalise(&self) -> Stack {
        let mut receipts = None;
        let mut admission: Option<Admission> = None;
        let mut quotas: BTreeMap<(&str, Unit), u64> = BTreeMap::new();
        let mut shared: BTreeMap<&str, Amounts> = BTreeMap::new();
        let mut others: Vec<&Element> = Vec::new();
        for element in &self.0 {
            match element {
                Element::Receipts => receipts = Some(Element::Receipts),
                Element::Admission(next) => {
                    // Narrowed by itself too: one admission and two alike end in the same form.
                    admission = Some(admission.as_ref().unwrap_or(next).narrow(next));
                }
                Element::Quota { id, unit, limit } => {
                    quotas.entry((id, *unit)).and_modify(|least| *least = (*least).min(*limit)).or_insert(*limit);
                }
                Element::SharedQuota { id, limits } => {
                    let known = shared.entry(id).or_default();
                    for (unit, limit) in limits {
                        known.entry(*unit).and_modify(|least| *least = (*least).min(*limit)).or_insert(*limit);
                    }
                }
                Element::Answering(_) => others.push(element),
                Element::Authority(_) | Element::Containment(_) | Element::Approval(_) => {
                    if !others.contains(&element) {
                        others.push(element);
                    }
                }
            }
        }
        let quotas = quotas.into_iter().map(|((id, unit), limit)| Element::Quota { id: id.to_owned(), unit, limit });
        let shared = shared.into_iter().map(|(id, limits)| Element::SharedQuota { id: id.to_owned(), limits });
        let mut elements: Vec<Element> = receipts
            .into_iter()
            .chain(admission.map(Element::Admission))
            .chain(quotas)
            .chain(shared)
            .chain(others.into_iter().cloned())
            .collect();
        elements.sort_by_key(Element::rank);
        Stack(elements)
    }

    /// This stack, narrowed by another further in: a child run's by its parent's, a fork's by its room's.
    #[must_use]
    pub fn compose(&self, inner: &Stack) -> Stack {
        Stack(self.0.iter().chain(&inner.0).cloned().collect()).normalise()
    }

    /// The chain of the normal form. Receipts are outermost, whether or not the stack mentions them, and authority
    /// comes before every other check of its rank.
    ///
    /// # Errors
    ///
    /// [`BuildError::NoAdmission`].
    pub fn build(&self, wiring: &Wiring<'_>) -> Result<Chain, BuildError> {
        let normal = Stack(vec![Element::Receipts]).compose(self);
        if !normal.0.iter().any(|element| element.rank() == Rank::Admission) {
            return Err(BuildError::NoAdmission);
        }
        let (outer, inner): (Vec<&Element>, Vec<&Element>) =
            normal.0.iter().partition(|element| element.rank() < Rank::Authority);
        let mut handlers: Vec<_> = outer.into_iter().map(|element| element.handler(wiring)).collect();
        handlers.push(Arc::new(Authority::new(wiring.run.clone(), wiring.owner)));
        handlers.extend(inner.into_iter().map(|element| element.handler(wiring)));
        Ok(Chain::new(handlers))
    }
}

impl Element {
    fn handler(&self, wiring: &Wiring<'_>) -> Arc<dyn Handler> {
        match self {
            Element::Receipts => Arc::new(Receipts::new(wiring.ledger.clone(), wiring.run.clone())),
            Element::Admission(admission) => Arc::new(admission.clone()),
            Element::Quota { id, unit, limit } => {
                let quota = Quota::new(id.clone(), *unit, *limit, wiring.meters);
                Arc::new(quota.charging_once(wiring.ledger.clone(), wiring.run.clone()))
            }
            Element::SharedQuota { id, limits } => {
                let (ledger, run) = (wiring.ledger.clone(), wiring.run.clone());
                Arc::new(SharedQuota::new(id.clone(), limits.clone(), ledger, run))
            }
            Element::Authority(step)
            | Element::Containment(step)
            | Element::Answering(step)
            | Element::Approval(step) => step.0.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::{admit, wait, FakeWorld, Judge},
        effect::{tests::sample, Effect, Kind},
        ledger::{tests::Fixture, ReceiptQuery},
    };

    fn step(name: &'static str) -> Step {
        Step(Arc::new(Judge(name, |_: &Effect| None)))
    }

    fn build(stack: &Stack, fixture: &Fixture) -> Result<Chain, BuildError> {
        let owner = sample(Kind::FsWrite).subject.uid;
        stack.build(&Wiring { ledger: &fixture.ledger, run: &fixture.run, owner, meters: &Meters::default() })
    }

    #[test]
    fn the_order_of_a_chain_does_not_depend_on_the_order_of_its_stack() {
        let fixture = Fixture::new();
        let elements = vec![
            Element::Approval(step("approval")),
            Element::Answering(step("first")),
            Element::Containment(step("guard")),
            Element::Answering(step("second")),
            Element::Quota { id: "run".into(), unit: Unit::WriteBytes, limit: 10 },
            Element::Authority(step("further")),
            Element::Admission(Admission::everything()),
            Element::Receipts,
        ];
        let chain = build(&Stack(elements), &fixture).unwrap();
        assert_eq!(
            chain.describe(),
            "receipts → admission → authority → further → quota → guard → first → second → approval → world"
        );
    }

    #[test]
    fn the_example_of_the_module_is_true() {
        let (a, b) = (Element::Answering(step("a")), Element::Answering(step("b")));
        let quota = |limit| Element::Quota { id: "run".into(), unit: Unit::WriteBytes, limit };
        let (one, two) = (admit(&[Kind::FsRead, Kind::ProcessExec]), admit(&[Kind::FsRead, Kind::NetConnect]));
        let outer = Stack(vec![quota(10), a.clone(), Element::Admission(one.clone())]);
        let inner = Stack(vec![Element::Admission(two.clone()), quota(5), b.clone()]);
        assert_eq!(outer.compose(&inner), Stack(vec![Element::Admission(one.narrow(&two)), quota(5), a, b]));
    }

    #[test]
    fn a_stack_without_an_admission_is_not_built() {
        let fixture = Fixture::new();
        assert!(matches!(build(&Stack::default(), &fixture), Err(BuildError::NoAdmission)));
        assert!(matches!(build(&Stack(vec![Element::Receipts]), &fixture), Err(BuildError::NoAdmission)));
    }

    #[test]
    fn receipts_are_outermost_even_if_nobody_asked_for_them() {
        let fixture = Fixture::new();
        let chain = build(&Stack(vec![Element::Admission(Admission::nothing())]), &fixture).unwrap();
        assert_eq!(chain.describe(), "receipts → admission → authority → world");
        let world = FakeWorld::default();
        let answer = wait(chain.perform(&sample(Kind::FsWrite), &world));
        assert_eq!((answer.is_success(), answer.decided_by), (false, "admission"));
        assert!(world.done.lock().unwrap().is_empty());
        let receipts: Vec<_> = fixture.ledger.receipts(&ReceiptQuery::default()).unwrap().collect();
        assert_eq!(receipts.len(), 1);
        assert_eq!(receipts[0].as_ref().unwrap().decided_by, "admission");
    }

    #[test]
    fn one_effect_under_two_stacks_has_two_answers() {
        let fixture = Fixture::new();
        let effect = sample(Kind::FsWrite);
        let decision = |kinds: &[Kind]| {
            let chain = build(&Stack(vec![Element::Admission(admit(kinds))]), &fixture).unwrap();
            wait(chain.perform(&effect, &FakeWorld::default())).is_success()
        };
        assert_eq!((decision(&[Kind::FsWrite]), decision(&[Kind::FsRead])), (true, false));
    }

    #[test]
    fn a_guard_given_twice_stays_once_and_an_answering_handler_twice() {
        let (guard, answering) = (step("guard"), step("answers"));
        let twice = Stack(vec![
            Element::Containment(guard.clone()),
            Element::Answering(answering.clone()),
            Element::Containment(guard.clone()),
            Element::Answering(answering.clone()),
            Element::Containment(step("guard")),
        ]);
        assert_eq!(twice.normalise().0.len(), 4);
    }
}
