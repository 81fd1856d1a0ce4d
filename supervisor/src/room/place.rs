//! Where a run's changes are, kept beside them, so that `diff`, `apply`, `discard` and recovery need nothing else.

use super::{
    batch::{self, ApplyError, BatchKind, IdShift, Recovered},
    changes::{self, ChangeSet, ScanError, Summary},
    diff::{self, DiffReport},
    layer, mirror,
    path::{spell, unspell_any},
    tree,
};
use crate::{effect::RunId, ledger::record::ChangesState};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashSet,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

const FILE: &str = "room.json";

/// How often a scan of a live run is begun again when the program removes what is being read.
const LIVE_ATTEMPTS: usize = 5;

/// How the run sees its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum View {
    /// An overlay; the changes are in `layer/upper`, overlayfs's own directory is `layer/work`.
    Overlay,
    /// A copy in `mirror`.
    Mirror,
}

/// `<run>/room.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// 1.
    pub version: u32,
    /// The run.
    pub run: RunId,
    /// The workspace's absolute path on the host, spelled as paths are.
    pub workspace: String,
    /// The root's inode number, so that another directory at the same path is not taken for it.
    pub workspace_inode: u64,
    /// When the run started, in nanoseconds since the epoch.
    pub since_ns: i64,
    /// How ids are put back.
    pub shift: Option<IdShift>,
    /// Overlay or mirror.
    pub view: View,
}

/// Why a run's place cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The run's directory or a file in it cannot be read or written.
    #[error("cannot {deed} `{path}`: {source}")]
    Ours {
        /// What was tried.
        deed: &'static str,
        /// On which file.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// The workspace is not there, or another directory is.
    #[error("the workspace `{path}` is not the directory that the run worked in; move it back, or `tollgate discard` the run")]
    Elsewhere {
        /// Its path.
        path: String,
    },
    /// The changes cannot be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The state of earlier batches cannot be read.
    #[error(transparent)]
    Batch(#[from] ApplyError),
}

/// A run's directories, open.
pub struct OpenPlace {
    /// What the file says.
    pub place: Place,
    /// The run's own directory.
    pub run_dir: Arc<OwnedFd>,
    /// The workspace's root.
    pub workspace: Arc<OwnedFd>,
    /// The run's layer or mirror; none when its changes are discarded.
    pub source: Option<Arc<OwnedFd>>,
}

impl Place {
    /// Writes down where a run that is about to start keeps its changes.
    ///
    /// Whole or not at all, but not synced: it stands on the way of every run's start, and a layer that a loss of
    /// power takes along needs no file that points to it.
    ///
    /// # Errors
    /// [`PlaceError::Ours`].
    pub fn create(
        run_dir: &OwnedFd,
        run: &RunId,
        workspace: &Path,
        since_ns: i64,
        shift: Option<IdShift>,
        view: View,
    ) -> Result<Place, PlaceError> {
        let root = tree::open_root(workspace).map_err(ours("open", workspace))?;
        let stat = rustix::fs::fstat(&root).map_err(|error| ours("look at", workspace)(error.into()))?;
        let place = Place {
            version: 1,
            run: run.clone(),
            workspace: spell(workspace),
            workspace_inode: Summary::of(&stat).inode,
            since_ns,
            shift,
            view,
        };
        let text = serde_json::to_vec(&place).map_err(|error| ours("write", Path::new(FILE))(error.into()))?;
        tree::write_whole(run_dir.as_fd(), FILE, &text).map_err(ours("write", Path::new(FILE)))?;
        Ok(place)
    }

    /// Whether a run's directory says where its changes are: a run that could write its workspace has done so before
    /// its program started.
    pub fn is_in(run_dir: &Path) -> bool {
        run_dir.join(FILE).symlink_metadata().is_ok()
    }

    /// Opens what `create` wrote down in a run's directory.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn open(run_dir: &Path) -> Result<OpenPlace, PlaceError> {
        let handle = tree::open_root(run_dir).map_err(ours("open", run_dir))?;
        let file = run_dir.join(FILE);
        let text = tree::read_ours(handle.as_fd(), FILE)
            .and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()))
            .map_err(ours("read", &file))?;
        let place: Place = serde_json::from_slice(&text).map_err(|error| ours("read", &file)(error.into()))?;
        let path = place.workspace_path().map_err(ours("read", &file))?;
        let elsewhere = || PlaceError::Elsewhere { path: super::path::printable(&path) };
        let workspace = match tree::open_root(&path) {
            Ok(workspace) => workspace,
            Err(error) if tree::absent(&error) || error.raw_os_error() == Some(libc::ENOTDIR) => {
                return Err(elsewhere())
            }
            Err(error) => return Err(ours("open", &path)(error)),
        };
        let stat = rustix::fs::fstat(&workspace).map_err(|error| ours("look at", &path)(error.into()))?;
        if Summary::of(&stat).inode != place.workspace_inode {
            return Err(elsewhere());
        }
        let name = match place.view {
            View::Overlay => layer::UPPER,
            View::Mirror => layer::MIRROR,
        };
        let source = match tree::open_directory(handle.as_fd(), Path::new(name), rustix::fs::OFlags::RDONLY) {
            Ok(source) => Some(Arc::new(source)),
            Err(error) if tree::absent(&error) => None,
            Err(error) => return Err(ours("open", &run_dir.join(name))(error)),
        };
        Ok(OpenPlace { place, run_dir: Arc::new(handle), workspace: Arc::new(workspace), source })
    }

    /// The workspace's path on the host.
    ///
    /// # Errors
    /// `InvalidData` when the file was tampered with.
    pub fn workspace_path(&self) -> io::Result<PathBuf> {
        unspell_any(&self.workspace).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

fn ours<'p>(deed: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> PlaceError + 'p {
    move |source| PlaceError::Ours { deed, path: super::path::printable(path), source }
}

impl OpenPlace {
    /// What the run changed and no batch applied yet. Works while the run lives, as of now.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn changes(&self) -> Result<ChangeSet, PlaceError> {
        let Some(source) = &self.source else { return Ok(ChangeSet::default()) };
        let mut attempts = 0;
        let set = loop {
            let scanned = match self.place.view {
                View::Overlay => changes::scan(source, &self.workspace),
                View::Mirror => mirror::scan(&self.run_dir, source, &self.workspace),
            };
            match scanned {
                Err(ScanError::Read { source, .. }) if tree::absent(&source) && attempts < LIVE_ATTEMPTS => {
                    attempts += 1;
                }
                other => break other?,
            }
        };
        Ok(batch::keep_pending(&self.run_dir, set)?)
    }

    /// Shows what is pending, and what was applied, from the before-images.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn diff(&self) -> Result<DiffReport, PlaceError> {
        let mut report = DiffReport::default();
        for (path, manifest) in batch::manifests(&self.run_dir)? {
            if manifest.kind == BatchKind::Undo {
                // What is undone is no change any more.
                continue;
            }
            report.applied.extend(diff::applied(&self.run_dir, &path, &manifest, &self.workspace));
        }
        if let Some(source) = &self.source {
            let set = self.changes()?;
            report.pending = diff::pending(&set, source, &self.workspace);
            report.skipped = set.skipped;
        }
        Ok(report)
    }

    /// Finishes or undoes what a crash left; see [`batch::recover`].
    ///
    /// # Errors
    /// [`PlaceError::Batch`].
    pub fn recover(&self) -> Result<Recovered, PlaceError> {
        Ok(batch::recover(&self.run_dir, &self.workspace)?)
    }

    /// As [`OpenPlace::recover`], waiting at most so long for another batch in the same workspace.
    ///
    /// # Errors
    /// [`PlaceError::Batch`], with [`ApplyError::Busy`] when the other batch took longer.
    pub fn recover_within(&self, wait: Duration) -> Result<Recovered, PlaceError> {
        Ok(batch::recover_within(&self.run_dir, &self.workspace, wait)?)
    }

    /// Where the changes of a run stand whose program is over, without reading them all.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn standing(&self) -> Result<ChangesState, PlaceError> {
        let kinds: HashSet<BatchKind> =
            batch::manifests(&self.run_dir)?.iter().map(|(_, manifest)| manifest.kind).collect();
        let (applied, undone) = (kinds.contains(&BatchKind::Apply), kinds.contains(&BatchKind::Undo));
        Ok(match batch::pending(&self.run_dir)? {
            Some(pending) if !pending.is_empty() && applied => ChangesState::Partial,
            Some(pending) if !pending.is_empty() => ChangesState::Pending,
            Some(_) if applied && undone => ChangesState::PartlyUndone,
            Some(_) if applied => ChangesState::Applied,
            Some(_) if undone => ChangesState::Undone,
            Some(_) => ChangesState::Discarded,
            None if self.is_untouched()? => ChangesState::None,
            None => ChangesState::Pending,
        })
    }

    /// Whether the run left no trace. A layer is not read for it: what is in it may have to be compared byte by byte,
    /// and a mere trace is as well kept for `tollgate diff`.
    fn is_untouched(&self) -> Result<bool, PlaceError> {
        let Some(source) = &self.source else { return Ok(true) };
        match self.place.view {
            View::Overlay => {
                let names = tree::names(source.as_fd()).map_err(ours("list", Path::new(layer::UPPER)))?;
                Ok(names.is_empty())
            }
            View::Mirror => Ok(self.changes()?.changes.is_empty()),
        }
    }

    /// Removes the run's layer, when all that it changed was applied.
    ///
    /// # Errors
    /// [`PlaceError::Batch`].
    pub fn remove_layer(&self) -> Result<(), PlaceError> {
        Ok(batch::remove_layer(&self.run_dir)?)
    }

    /// Throws away what is pending.
    ///
    /// # Errors
    /// [`PlaceError::Batch`].
    pub fn discard(&self) -> Result<(), PlaceError> {
        Ok(batch::discard(&self.run_dir)?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Fixture;
    use super::*;

    #[test]
    fn another_directory_at_the_workspaces_path_is_not_taken_for_it() {
        let fixture = Fixture::new();
        let path = fixture.workspace_path();
        Place::create(&fixture.run_dir, &fixture.run, &path, 0, None, View::Overlay).unwrap();
        assert!(Place::open(&fixture.run_path()).is_ok());
        std::fs::rename(&path, path.with_extension("old")).unwrap();
        assert!(matches!(Place::open(&fixture.run_path()), Err(PlaceError::Elsewhere { .. })));
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(Place::open(&fixture.run_path()), Err(PlaceError::Elsewhere { .. })));
    }
}
