//! The workspace as a jail's program sees it, for the API door: there once the jail stands.

use crate::effect::{fs, path::from_workspace_path, Request};
use crate::{
    chain::{Answer, BoxFuture, World},
    effect::Effect,
    world::fs::WorkspaceFiles,
};
use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

/// The file effects of a run whose view may not stand yet.
#[derive(Clone, Default)]
pub struct LateFiles {
    files: Arc<OnceLock<WorkspaceFiles>>,
    hidden: Arc<OnceLock<Vec<PathBuf>>>,
}

impl LateFiles {
    /// Says where the view is, and what of the workspace it masks. Only the first time counts.
    pub fn arrive(&self, files: WorkspaceFiles, hidden: Vec<PathBuf>) {
        let _ = self.hidden.set(hidden);
        let _ = self.files.set(files);
    }

    /// The refusal of an effect that touches something masked, or a folder that holds it.
    ///
    /// The masks are mounts of the jail's own namespace, which bind the program and not the supervisor: a move made
    /// here would take what is masked along under another name.
    fn refusal(&self, effect: &Effect) -> Option<Answer> {
        let Request::Fs(request) = &effect.request else { return None };
        let paths = match request {
            fs::Request::Read { path, .. }
            | fs::Request::List { path }
            | fs::Request::Write { path, .. }
            | fs::Request::Delete { path, .. } => vec![path],
            fs::Request::Move { path, to } => vec![path, to],
        };
        let takes_along = matches!(request, fs::Request::Delete { .. } | fs::Request::Move { .. });
        let hidden = self.hidden.get()?;
        let touches = |text: &&String| {
            // A path that is none is refused by whoever does the effect.
            let Ok(path) = from_workspace_path(text) else { return false };
            hidden.iter().any(|mask| path.starts_with(mask) || (takes_along && mask.starts_with(&path)))
        };
        let path = paths.into_iter().find(touches)?;
        Some(Answer::refused(
            "view",
            format!("{} {path}: it is hidden from this run, or holds what is", effect.kind),
            "a `[[deny]]` rule on `fs/read` names it, or it holds keys; copy what the program needs elsewhere",
        ))
    }
}

impl World for LateFiles {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        if let Some(refusal) = self.refusal(effect) {
            return Box::pin(std::future::ready(refusal));
        }
        match self.files.get() {
            Some(files) => files.execute(effect),
            None => Box::pin(std::future::ready(Answer::failed(
                format!("{} {}: the run's view does not stand yet", effect.kind, effect.resource),
                "ask again once the program runs",
            ))),
        }
    }
}
