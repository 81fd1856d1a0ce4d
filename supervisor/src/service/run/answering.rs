//! What answers in the world's place during a run, and what its program is asked about one by one.

use crate::{doors::program, effect::Kind};
use tollgate_shim::protocol::Asking;

/// How a run's effects are answered, beside by the world. The default changes nothing.
#[derive(Clone, Debug, Default)]
pub struct Answering {
    /// Which of the program's own calls have a receipt each.
    pub receipts: Receipts,
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
    /// The kinds of calls that wait for the chain.
    fn waiting(&self) -> Vec<Kind> {
        let all = program::KINDS.iter().map(|(kind, _)| *kind);
        match self.receipts {
            Receipts::Opens => all.collect(),
            Receipts::Changes => Vec::new(),
        }
    }

    /// The same, as the shim calls them.
    pub(super) fn asked(&self) -> Vec<Asking> {
        let waiting = self.waiting();
        program::KINDS.iter().filter(|(kind, _)| waiting.contains(kind)).map(|(_, asking)| *asking).collect()
    }
}
