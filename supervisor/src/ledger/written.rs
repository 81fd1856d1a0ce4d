//! What a run's program wrote by asking at its socket, from the receipts.
//!
//! Such a write is charged when it is asked for, and lies in the run's own layer until the layer is applied as a whole.
//! From here a quota knows what of the layer was charged already. The receipts are the one source: they outlive the
//! process, so that changes which are applied later, by another process, are charged as those applied at once.

use super::{writer::Durability, Ledger, Result};
use crate::effect::{Digest, RunId};
use std::{collections::HashMap, path::Path};

/// Files that were written at the API door and did not leave the run's layer yet, by their path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    files: HashMap<String, File>,
    /// Where a content was written; an entry counts only as long as the file is there with this content.
    paths: HashMap<Digest, Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct File {
    digest: Digest,
    bytes: u64,
}

impl Written {
    /// A file was written whole; what its path held before is gone, and was charged.
    fn write(&mut self, path: &str, digest: Digest, bytes: u64) {
        self.files.insert(path.to_owned(), File { digest, bytes });
        self.paths.entry(digest).or_default().push(path.to_owned());
    }

    /// A path was deleted, with all below it.
    fn delete(&mut self, path: &str) {
        self.files.retain(|file, _| !Path::new(file).starts_with(path));
    }

    /// How many bytes of a change that is about to be applied were charged already: of a file that lies where it was
    /// written, as many as were written there; of one whose content was written elsewhere, and moved since, all of
    /// them. Each written byte is given once.
    pub fn take(&mut self, path: &str, digest: &Digest, bytes: u64) -> u64 {
        let mut given = self.take_from(path, bytes);
        if given > 0 {
            return given;
        }
        while let (0, Some(path)) = (given, self.paths.get(digest).and_then(|paths| paths.last()).cloned()) {
            if self.files.get(&path).is_some_and(|file| file.digest == *digest) {
                given = self.take_from(&path, bytes);
            }
            if !self.files.contains_key(&path) || given == 0 {
                self.paths.get_mut(digest).and_then(Vec::pop);
            }
        }
        given
    }

    /// What the file at this path did not need stays, for one that its content was moved to.
    fn take_from(&mut self, path: &str, bytes: u64) -> u64 {
        let Some(file) = self.files.get_mut(path) else { return 0 };
        let given = file.bytes.min(bytes);
        file.bytes -= given;
        if file.bytes == 0 {
            self.files.remove(path);
        }
        given
    }
}

impl Ledger {
    /// What a run wrote at its API door and has not applied yet, by every receipt that was asked for until now.
    ///
    /// # Errors
    ///
    /// The database's, and [`super::Error::NotFound`] when there is no such run.
    pub fn written_at_door(&self, run: &RunId) -> Result<Written> {
        // Receipts that are on their way to the database come before this.
        self.call(Durability::Process, |_| Ok(()))?;
        let number = self.run_number(run)?;
        self.read("read what a run wrote", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT kind, door, resource, bytes, result_digest FROM receipts \
                 WHERE id > ?1 << 32 AND id < (?1 + 1) << 32 AND kind IN ('fs/write', 'fs/delete') \
                 AND door IN ('api', 'workspace') AND decision IN ('allowed', 'planned') ORDER BY id",
            )?;
            let mut written = Written::default();
            let mut rows = statement.query([number])?;
            while let Some(row) = rows.next()? {
                let (kind, door) = (row.get_ref(0)?.as_str()?, row.get_ref(1)?.as_str()?);
                let (path, bytes) = (row.get_ref(2)?.as_str()?, row.get::<_, i64>(3)?);
                let bytes = u64::try_from(bytes).unwrap_or(0);
                // Directories, links and attributes have no content, and were charged nothing.
                let digest = row.get::<_, Option<[u8; 32]>>(4)?.map(Digest);
                match (kind, door, digest) {
                    ("fs/write", "api", Some(digest)) => written.write(path, digest, bytes),
                    ("fs/write", "workspace", Some(digest)) => {
                        written.take(path, &digest, bytes);
                    }
                    ("fs/delete", _, _) => written.delete(path),
                    _ => {}
                }
            }
            Ok(Ok(written))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> Written {
        let mut written = Written::default();
        written.write("a", Digest::of(b"a"), 5);
        written.write("sub/b", Digest::of(b"b"), 7);
        written
    }

    #[test]
    fn a_file_where_it_was_written_is_charged_its_growth_only_and_once() {
        let mut written = written();
        assert_eq!(written.take("a", &Digest::of(b"longer"), 12), 5);
        assert_eq!(written.take("a", &Digest::of(b"longer"), 12), 0);
        assert_eq!(written.take("sub/b", &Digest::of(b"shorter"), 2), 2);
    }

    #[test]
    fn a_content_that_was_moved_since_is_charged_no_more_and_its_copy_is() {
        let mut written = written();
        assert_eq!(written.take("moved", &Digest::of(b"b"), 7), 7);
        assert_eq!(written.take("copied", &Digest::of(b"b"), 7), 0);
        assert_eq!(written.take("sub/b", &Digest::of(b"b"), 7), 0);
    }

    #[test]
    fn a_small_file_in_the_place_of_a_moved_one_leaves_it_the_rest() {
        let mut written = written();
        assert_eq!(written.take("sub/b", &Digest::of(b"new"), 3), 3);
        assert_eq!(written.take("moved", &Digest::of(b"b"), 7), 4);
        assert_eq!(written.take("copied", &Digest::of(b"b"), 7), 0);
    }

    #[test]
    fn what_was_written_again_counts_by_its_newest_content() {
        let mut written = written();
        written.write("a", Digest::of(b"second"), 3);
        assert_eq!(written.take("elsewhere", &Digest::of(b"a"), 5), 0, "that content is gone");
        assert_eq!(written.take("elsewhere", &Digest::of(b"second"), 3), 3);
    }

    #[test]
    fn what_was_deleted_since_gives_nothing() {
        let mut written = written();
        written.delete("sub");
        assert_eq!(written.take("sub/b", &Digest::of(b"b"), 7), 0);
        assert_eq!(written.take("elsewhere", &Digest::of(b"b"), 7), 0);
        assert_eq!(written.take("a", &Digest::of(b"a"), 5), 5, "only what lies below");
    }
}
