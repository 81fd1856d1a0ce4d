//! What answers in the world's place during a run, and what its program is asked about one by one.

use crate::{
    chain::{
        faults::{FaultRule, Faults},
        stack::{Element, Step},
    },
    doors::program,
    effect::Kind,
    policy::Policy,
};
use std::sync::Arc;
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
}

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
    /// The handlers of the policy, then those that were asked for.
    pub fn under(self, policy: &Policy) -> Answering {
        let mut modes = Vec::new();
        if !policy.handlers.faults.is_empty() {
            modes.push(Mode::Faults(policy.handlers.faults.clone()));
        }
        modes.extend(self.modes);
        Answering { modes, ..self }
    }

    /// The kinds of calls that wait for the chain.
    fn waiting(&self) -> Vec<Kind> {
        if self.receipts == Receipts::Opens {
            return program::KINDS.iter().map(|(kind, _)| *kind).collect();
        }
        let of_mode = |mode: &Mode| match mode {
            Mode::Faults(rules) => rules.iter().flat_map(FaultRule::waiting_kinds).collect::<Vec<_>>(),
        };
        self.modes.iter().flat_map(of_mode).collect()
    }

    /// The same, as the shim calls them.
    pub(super) fn asked(&self) -> Vec<Asking> {
        let waiting = self.waiting();
        program::KINDS.iter().filter(|(kind, _)| waiting.contains(kind)).map(|(_, asking)| *asking).collect()
    }
}

/// The answering handlers of one run, made before it starts.
pub(super) struct Handlers {
    elements: Vec<Element>,
    faults: Vec<Arc<Faults>>,
}

impl Handlers {
    pub(super) fn new(answering: &Answering) -> Handlers {
        let mut handlers = Handlers { elements: Vec::new(), faults: Vec::new() };
        for mode in &answering.modes {
            match mode {
                Mode::Faults(rules) => {
                    let faults = Arc::new(Faults::new(rules.clone()));
                    handlers.elements.push(Element::Answering(Step(faults.clone())));
                    handlers.faults.push(faults);
                }
            }
        }
        handlers
    }

    /// Their places in the stack, in the order given.
    pub(super) fn elements(&self) -> Vec<Element> {
        self.elements.clone()
    }

    /// How many effects were made to go wrong; none where nothing could be.
    pub(super) fn injected(&self) -> Option<u64> {
        (!self.faults.is_empty()).then(|| self.faults.iter().map(|faults| faults.injected()).sum())
    }
}
