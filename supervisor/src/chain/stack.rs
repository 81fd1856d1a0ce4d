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

use super::{
    admission::Admission,
    quota::{Meters, Quota},
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
    /// A check of authority.
    Authority(Step),
    /// A quota of bytes written.
    Quota {
        /// Which meter: those who name one id share it.
        id: String,
        /// At most this many bytes. 0 is none at all.
        limit_bytes: u64,
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
            Element::Quota { .. } => Rank::Quota,
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
    /// of each quota, in order of their ids. Elements of the other ranks keep their order; a guard that is there
    /// twice stays once, while an answering handler given twice answers twice.
    #[must_use]
    pub fn normalise(&self) -> Stack {
        let mut receipts = None;
        let mut admission: Option<Admission> = None;
        let mut quotas: BTreeMap<&str, u64> = BTreeMap::new();
        let mut others: Vec<&Element> = Vec::new();
        for element in &self.0 {
            match element {
                Element::Receipts => receipts = Some(Element::Receipts),
                Element::Admission(next) => {
                    // Narrowed by itself too: one admission and two alike end in the same form.
                    admission = Some(admission.as_ref().unwrap_or(next).narrow(next));
                }
                Element::Quota { id, limit_bytes } => {
                    quotas.entry(id).and_modify(|least| *least = (*least).min(*limit_bytes)).or_insert(*limit_bytes);
                }
                Element::Answering(_) => others.push(element),
                Element::Authority(_) | Element::Containment(_) | Element::Approval(_) => {
                    if !others.contains(&element) {
                        others.push(element);
                    }
                }
            }
        }
        let quotas = quotas.into_iter().map(|(id, limit_bytes)| Element::Quota { id: id.to_owned(), limit_bytes });
        let mut elements: Vec<Element> = receipts
            .into_iter()
            .chain(admission.map(Element::Admission))
            .chain(quotas)
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

    /// The chain of the normal form. Receipts are outermost, whether or not the stack mentions them.
    ///
    /// # Errors
    ///
    /// [`BuildError::NoAdmission`].
    pub fn build(&self, wiring: &Wiring<'_>) -> Result<Chain, BuildError> {
        let normal = Stack(vec![Element::Receipts]).compose(self);
        if !normal.0.iter().any(|element| element.rank() == Rank::Admission) {
            return Err(BuildError::NoAdmission);
        }
        Ok(Chain::new(normal.0.iter().map(|element| element.handler(wiring)).collect()))
    }
}

impl Element {
    fn handler(&self, wiring: &Wiring<'_>) -> Arc<dyn Handler> {
        match self {
            Element::Receipts => Arc::new(Receipts::new(wiring.ledger.clone(), wiring.run.clone())),
            Element::Admission(admission) => Arc::new(admission.clone()),
            Element::Quota { id, limit_bytes } => Arc::new(Quota::new(id.clone(), *limit_bytes, wiring.meters)),
            Element::Authority(step)
            | Element::Containment(step)
            | Element::Answering(step)
            | Element::Approval(step) => step.0.clone(),
        }
    }
}
