//! The workspace as a jail's program sees it, for the API door: there once the jail stands.

use crate::{
    chain::{Answer, BoxFuture, World},
    effect::Effect,
    world::fs::WorkspaceFiles,
};
use std::sync::{Arc, OnceLock};

/// The file effects of a run whose view may not stand yet.
#[derive(Clone, Default)]
pub struct LateFiles {
    files: Arc<OnceLock<WorkspaceFiles>>,
}

impl LateFiles {
    /// Says where the view is. Only the first time counts.
    pub fn arrive(&self, files: WorkspaceFiles) {
        let _ = self.files.set(files);
    }
}

impl World for LateFiles {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        match self.files.get() {
            Some(files) => files.execute(effect),
            None => Box::pin(std::future::ready(Answer::failed(
                format!("{} {}: the run's view does not stand yet", effect.kind, effect.resource),
                "ask again once the program runs",
            ))),
        }
    }
}
