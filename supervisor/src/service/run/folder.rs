//! A run's own folder in the state directory.

use super::{
    super::recovery::{self, Layer},
    RunRequest,
};
use crate::{
    effect::RunId,
    jail::spec::{self, Privilege, Store},
    ledger::Ledger,
    room::{layer, tree},
};
use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// A run's own folder in the state directory.
pub(super) struct Folder {
    pub(super) path: PathBuf,
}

impl Folder {
    /// The folder of this run, which [`Folder::make`] makes.
    pub(super) fn of(ledger: &Ledger, id: &RunId) -> Folder {
        Folder { path: ledger.run_dir(id) }
    }

    /// Makes it, once the run is in the ledger: a folder that no run is known for would be nobody's to remove.
    pub(super) fn make(&self, id: &RunId, request: &RunRequest) -> Result<(), String> {
        let path = &self.path;
        let failed = |path: &Path, error: io::Error| format!("the run's folder {}: {error}", path.display());
        let make = |path: &Path, mode: u32| {
            DirBuilder::new().recursive(true).mode(mode).create(path).map_err(|error| failed(path, error))
        };
        make(path, 0o700)?;
        // The jail's own user must be able to walk through this one; nobody else gets past the folder above.
        make(&path.join("layer"), 0o711)?;
        make(&path.join("layer/upper"), 0o755)?;
        make(&path.join("layer/work"), 0o755)?;
        make(&path.join("door"), 0o711)?;
        // The overlay's root shows the layer's own mode and owner, so they are the workspace's.
        if let Ok(found) = std::fs::metadata(&request.workspace) {
            let _ = std::fs::set_permissions(path.join("layer/upper"), found.permissions());
        }
        if request.caller.privilege == Privilege::Root {
            let own = Some(spec::run_uid(id));
            for part in ["layer/upper", "layer/work"] {
                let part = path.join(part);
                std::os::unix::fs::chown(&part, own, own).map_err(|error| failed(&part, error))?;
            }
        }
        Ok(())
    }

    pub(super) fn log(&self, name: &str) -> Option<File> {
        File::options().create(true).append(true).mode(0o600).open(self.path.join(name)).ok()
    }

    /// Where a copy of the workspace is, if the run works on one.
    pub(super) fn mirror(&self) -> PathBuf {
        self.path.join(layer::MIRROR)
    }

    /// Whether there is anything that could be applied. A mirror shows that only when it is compared.
    pub(super) fn has_changes(&self, store: Store) -> bool {
        let upper = self.path.join("layer/upper");
        store == Store::Mirror || std::fs::read_dir(upper).map_or(true, |mut entries| entries.next().is_some())
    }

    /// Whether it holds anything that a run wrote in its workspace, or may have.
    pub(super) fn holds_a_layer(&self) -> bool {
        self.has_changes(Store::Overlay) || self.mirror().exists()
    }

    /// Removes what a run that is over needs no more. Logs and before-images stay.
    pub(super) fn tidy(&self, layer: Layer) {
        let removed = tree::open_root(&self.path).and_then(|folder| recovery::remove_leftovers(&folder, layer));
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove what the run leaves");
        }
    }
}
