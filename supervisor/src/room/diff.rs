//! Shows what a run changed, without starting any program.
//!
//! Git is not asked, nor a pager or a diff command: the workspace's own settings could name one of the program's
//! making. Names and contents are escaped, so nothing in them can steer a terminal.

use super::{
    batch::Manifest,
    changes::{Change, ChangeKind, ChangeSet, NodeType, Skipped, Summary},
    path::{escape_controls, printable, spell, unspell},
    tree,
};
use rustix::fs::OFlags;
use serde_json::json;
use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The largest file whose lines are compared; larger ones are told by size and digest.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// How much text of lines one report holds; past it, files are told by size and digest.
pub const MAX_REPORT_BYTES: usize = 16 << 20;

/// How long the search for a small difference takes a file before a larger one is good enough.
const DEADLINE: Duration = Duration::from_millis(500);

/// Lines around a difference, as in diff(1) -u.
const CONTEXT: usize = 3;

/// What a run changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiffReport {
    /// Already in the workspace.
    pub applied: Vec<FileDiff>,
    /// Not applied yet.
    pub pending: Vec<FileDiff>,
    /// Made by the run and never shipped.
    pub skipped: Vec<Skipped>,
}

/// One change, with its lines where they can be shown.
#[derive(Clone, Debug, PartialEq)]
pub struct FileDiff {
    /// The change.
    pub change: Change,
    /// What can be shown of the contents.
    pub body: Body,
}

/// What can be shown of a change's contents.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Nothing: a directory, a link, a deletion of many, other attributes.
    None,
    /// Lines.
    Lines(Vec<Hunk>),
    /// Not text.
    Binary,
    /// Too large to compare by lines.
    TooLarge,
    /// The content is not there to be read any more, and why.
    Gone(String),
}

/// One stretch of differing lines with what is around them.
#[derive(Clone, Debug, PartialEq)]
pub struct Hunk {
    /// The first old line, from 1; 0 when there is none.
    pub old_start: usize,
    /// How many old lines.
    pub old_lines: usize,
    /// The first new line, from 1; 0 when there is none.
    pub new_start: usize,
    /// How many new lines.
    pub new_lines: usize,
    /// The lines, escaped, each after its sign: a space, `-`, `+`, or a backslash for a missing line end.
    pub lines: Vec<String>,
}

/// Shows pending changes: the workspace is before, the run's layer after.
pub fn pending(set: &ChangeSet, source: &OwnedFd, workspace: &OwnedFd) -> Vec<FileDiff> {
    let mut budget = MAX_REPORT_BYTES;
    set.changes
        .iter()
        .map(|change| {
            let before = |path: &Path| tree::open_file(workspace.as_fd(), path);
            let after = |path: &Path| tree::open_file(source.as_fd(), path);
            FileDiff { change: change.clone(), body: body(change, before, after, &mut budget) }
        })
        .collect()
}

/// Shows an applied batch: its before-images, and the workspace where it still is as the batch left it.
pub fn applied(run_dir: &OwnedFd, directory: &Path, manifest: &Manifest, workspace: &OwnedFd) -> Vec<FileDiff> {
    let mut budget = MAX_REPORT_BYTES;
    let images = tree::open_directory(run_dir.as_fd(), directory, OFlags::RDONLY);
    manifest
        .changes
        .iter()
        .map(|change| {
            let before = |path: &Path| match &images {
                Ok(images) => open_image(images.as_fd(), manifest, path),
                Err(error) => Err(io::Error::from(error.kind())),
            };
            let after = |path: &Path| {
                let mut file = tree::open_file(workspace.as_fd(), path)?;
                let wanted = change.after.as_ref().and_then(|after| after.digest);
                if wanted.is_some() && Some(tree::digest(&mut file)?.0) != wanted {
                    return Err(io::Error::other("it was changed after the run"));
                }
                io::Seek::rewind(&mut file)?;
                Ok(file)
            };
            FileDiff { change: change.clone(), body: body(change, before, after, &mut budget) }
        })
        .collect()
}

/// The before-image of a path: a slot of its own, or below an ancestor's.
fn open_image(images: BorrowedFd<'_>, manifest: &Manifest, path: &Path) -> io::Result<File> {
    for slot in &manifest.slots {
        if let Ok(rest) = path.strip_prefix(&slot.path) {
            let mut at = PathBuf::from(slot.slot.to_string());
            if !rest.as_os_str().is_empty() {
                at.push(rest);
            }
            return tree::open_file(images, &at);
        }
    }
    let dropped = |text: &String| unspell(text).is_ok_and(|dropped| path.starts_with(dropped));
    Err(io::Error::other(if manifest.dropped.iter().any(dropped) {
        "the old content was too large to keep, or there was no space for it"
    } else {
        "the old content is not kept"
    }))
}

fn body(
    change: &Change,
    before: impl Fn(&Path) -> io::Result<File>,
    after: impl Fn(&Path) -> io::Result<File>,
    budget: &mut usize,
) -> Body {
    if !matches!(change.kind, ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted) {
        return Body::None;
    }
    let is_file = |summary: &Option<Summary>| summary.as_ref().is_some_and(|summary| summary.kind == NodeType::File);
    if !is_file(&change.before) && !is_file(&change.after) {
        return Body::None;
    }
    let size = |summary: &Option<Summary>| {
        if is_file(summary) {
            summary.as_ref().map_or(0, |summary| summary.size)
        } else {
            0
        }
    };
    if size(&change.before).max(size(&change.after)) > MAX_FILE_BYTES || *budget == 0 {
        return Body::TooLarge;
    }
    let read = |wanted: bool, open: &dyn Fn(&Path) -> io::Result<File>| -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        if wanted {
            open(&change.path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut content)?;
        }
        Ok(content)
    };
    let (old, new) = match (read(is_file(&change.before), &before), read(is_file(&change.after), &after)) {
        (Ok(old), Ok(new)) => (old, new),
        (Err(error), _) | (_, Err(error)) => return Body::Gone(error.to_string()),
    };
    if old.len() as u64 > MAX_FILE_BYTES || new.len() as u64 > MAX_FILE_BYTES {
        return Body::TooLarge;
    }
    if old.contains(&0) || new.contains(&0) {
        return Body::Binary;
    }
    let hunks = compare(&old, &new);
    let length: usize = hunks.iter().flat_map(|hunk| &hunk.lines).map(String::len).sum();
    if length > *budget {
        *budget = 0;
        return Body::TooLarge;
    }
    *budget -= length;
    Body::Lines(hunks)
}

/// Compares two texts by lines.
pub fn compare(old: &[u8], new: &[u8]) -> Vec<Hunk> {
    let (old, new) = (lines(old), lines(new));
    let operations =
        similar::capture_diff_slices_deadline(similar::Algorithm::Myers, &old, &new, Some(Instant::now() + DEADLINE));
    let mut hunks = Vec::new();
    for group in similar::group_diff_ops(contiguous(&operations), CONTEXT) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
        let (old_range, new_range) =
            (first.old_range().start..last.old_range().end, first.new_range().start..last.new_range().end);
        let mut text = Vec::new();
        for operation in &group {
            let (gone, come) = (&old[operation.old_range()], &new[operation.new_range()]);
            if operation.tag() == similar::DiffTag::Equal {
                gone.iter().for_each(|line| show(' ', line, &mut text));
            } else {
                gone.iter().for_each(|line| show('-', line, &mut text));
                come.iter().for_each(|line| show('+', line, &mut text));
            }
        }
        let start = |range: &std::ops::Range<usize>| if range.is_empty() { range.start } else { range.start + 1 };
        hunks.push(Hunk {
            old_start: start(&old_range),
            old_lines: old_range.len(),
            new_start: start(&new_range),
            new_lines: new_range.len(),
            lines: text,
        });
    }
    hunks
}

/// Numbers the operations anew: after the library has joined neighbouring insertions, the place in the other text
/// that a pure insertion or deletion names can be an earlier one. The operations themselves cover both texts in order.
fn contiguous(operations: &[similar::DiffOp]) -> Vec<similar::DiffOp> {
    use similar::DiffOp;
    let (mut old_index, mut new_index) = (0, 0);
    let mut numbered = Vec::with_capacity(operations.len());
    for operation in operations {
        let (old_len, new_len) = (operation.old_range().len(), operation.new_range().len());
        numbered.push(match operation.tag() {
            similar::DiffTag::Equal => DiffOp::Equal { old_index, new_index, len: old_len },
            similar::DiffTag::Delete => DiffOp::Delete { old_index, old_len, new_index },
            similar::DiffTag::Insert => DiffOp::Insert { old_index, new_index, new_len },
            similar::DiffTag::Replace => DiffOp::Replace { old_index, old_len, new_index, new_len },
        });
        old_index += old_len;
        new_index += new_len;
    }
    numbered
}

fn lines(text: &[u8]) -> Vec<&[u8]> {
    text.split_inclusive(|byte| *byte == b'\n').collect()
}

fn show(sign: char, line: &[u8], text: &mut Vec<String>) {
    let (content, ended) = match line.strip_suffix(b"\n") {
        Some(content) => (content, true),
        None => (line, false),
    };
    text.push(format!("{sign}{}", safe_line(content)));
    if !ended {
        text.push("\\ No newline at end of file".to_owned());
    }
}

/// A line as a person may see it: no control characters but tabs; bytes that are not UTF-8 as `\xNN`.
fn safe_line(line: &[u8]) -> String {
    let mut safe = String::with_capacity(line.len());
    for chunk in line.utf8_chunks() {
        for (index, part) in chunk.valid().split('\t').enumerate() {
            if index > 0 {
                safe.push('\t');
            }
            safe.push_str(&escape_controls(part));
        }
        for byte in chunk.invalid() {
            safe.push_str(&format!("\\x{byte:02x}"));
        }
    }
    safe
}

impl DiffReport {
    /// Writes the report for a person, in the form of a unified diff.
    ///
    /// # Errors
    /// What writing gives.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.applied.is_empty() && self.pending.is_empty() && self.skipped.is_empty() {
            return writeln!(out, "no changes");
        }
        for (title, diffs) in [("applied", &self.applied), ("pending", &self.pending)] {
            if !diffs.is_empty() {
                writeln!(out, "# {title}: {}", counted(diffs.len()))?;
            }
            for diff in diffs {
                diff.write_text(out)?;
            }
        }
        for skipped in &self.skipped {
            writeln!(out, "# not shipped: {} ({})", printable(&skipped.path), skipped.reason)?;
        }
        Ok(())
    }

    /// Writes the report as JSON, one object a line.
    ///
    /// Every line has `state` (`applied`, `pending` or `not-shipped`) and `path`; a change also `change`, `from`,
    /// `before`, `after`, `body` (`none`, `lines`, `binary`, `too-large` or `gone`) and `hunks`.
    ///
    /// # Errors
    /// What writing gives.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        for (state, diffs) in [("applied", &self.applied), ("pending", &self.pending)] {
            for diff in diffs {
                serde_json::to_writer(&mut *out, &diff.json(state))?;
                writeln!(out)?;
            }
        }
        for skipped in &self.skipped {
            let line = json!({ "state": "not-shipped", "path": spell(&skipped.path), "reason": skipped.reason });
            serde_json::to_writer(&mut *out, &line)?;
            writeln!(out)?;
        }
        Ok(())
    }
}

fn counted(count: usize) -> String {
    if count == 1 {
        "1 change".to_owned()
    } else {
        format!("{count} changes")
    }
}

fn kind_name(summary: &Summary) -> &'static str {
    match summary.kind {
        NodeType::File => "file",
        NodeType::Directory => "directory",
        NodeType::Link => "link",
        NodeType::Special => "special file",
    }
}

impl FileDiff {
    fn json(&self, state: &str) -> serde_json::Value {
        let (change, from) = match &self.change.kind {
            ChangeKind::Created => ("created", None),
            ChangeKind::Modified => ("modified", None),
            ChangeKind::Deleted => ("deleted", None),
            ChangeKind::Attributes => ("attributes", None),
            ChangeKind::Moved { from } => ("moved", Some(spell(from))),
        };
        let side = |summary: &Option<Summary>| {
            summary.as_ref().map(|summary| {
                json!({
                    "type": kind_name(summary),
                    "mode": summary.mode,
                    "size": summary.size,
                    "mtime_ns": summary.mtime_ns,
                    "digest": summary.digest,
                    "target": summary.target,
                })
            })
        };
        let (body, hunks, reason) = match &self.body {
            Body::None => ("none", None, None),
            Body::Binary => ("binary", None, None),
            Body::TooLarge => ("too-large", None, None),
            Body::Gone(reason) => ("gone", None, Some(reason)),
            Body::Lines(hunks) => {
                let hunks: Vec<_> = hunks
                    .iter()
                    .map(|hunk| {
                        json!({
                            "old_start": hunk.old_start, "old_lines": hunk.old_lines,
                            "new_start": hunk.new_start, "new_lines": hunk.new_lines, "lines": hunk.lines,
                        })
                    })
                    .collect();
                ("lines", Some(hunks), None)
            }
        };
        json!({
            "state": state,
            "path": spell(&self.change.path),
            "change": change,
            "from": from,
            "before": side(&self.change.before),
            "after": side(&self.change.after),
            "body": body,
            "hunks": hunks,
            "reason": reason,
        })
    }

    fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        let path = printable(&self.change.path);
        let (before, after) = (&self.change.before, &self.change.after);
        let described = |summary: &Option<Summary>| summary.as_ref().map_or("nothing", kind_name);
        match &self.change.kind {
            ChangeKind::Created => writeln!(
                out,
                "created {} {path}, mode {:04o}",
                described(after),
                after.as_ref().map_or(0, |after| after.mode)
            )?,
            ChangeKind::Deleted => writeln!(out, "deleted {} {path}", described(before))?,
            ChangeKind::Moved { from } => writeln!(out, "moved {} → {path}", printable(from))?,
            ChangeKind::Modified if described(before) != described(after) => {
                writeln!(out, "replaced {} {path} by a {}", described(before), described(after))?;
            }
            ChangeKind::Modified => writeln!(out, "modified {} {path}", described(after))?,
            ChangeKind::Attributes => writeln!(out, "attributes of {path}")?,
        }
        if let (Some(before), Some(after)) = (before, after) {
            if before.mode != after.mode && after.kind != NodeType::Link {
                writeln!(out, "  mode {:04o} → {:04o}", before.mode, after.mode)?;
            }
            if self.change.kind == ChangeKind::Attributes && before.mtime_ns != after.mtime_ns {
                writeln!(out, "  modification time {} → {} ns", before.mtime_ns, after.mtime_ns)?;
            }
        }
        for (word, side) in [("old", before), ("new", after)] {
            if let Some(target) = side.as_ref().and_then(|side| side.target.as_ref()) {
                writeln!(out, "  {word} target {}", escape_controls(target))?;
            }
        }
        let sizes = || {
            let size = |summary: &Option<Summary>| summary.as_ref().map_or(0, |summary| summary.size);
            format!("{} → {} bytes", size(before), size(after))
        };
        match &self.body {
            Body::None => Ok(()),
            Body::Binary => writeln!(out, "  binary, {}", sizes()),
            Body::TooLarge => writeln!(out, "  too large to show, {}", sizes()),
            Body::Gone(reason) => writeln!(out, "  content not shown: {}", escape_controls(reason)),
            Body::Lines(hunks) => {
                for hunk in hunks {
                    writeln!(
                        out,
                        "@@ -{},{} +{},{} @@",
                        hunk.old_start, hunk.old_lines, hunk.new_start, hunk.new_lines
                    )?;
                    for line in &hunk.lines {
                        writeln!(out, "{line}")?;
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        batch,
        place::{Place, View},
        testing::Fixture,
    };
    use super::*;
    use proptest::prelude::*;
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    fn text(report: &DiffReport) -> String {
        let mut out = Vec::new();
        report.write_text(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_before_image_that_was_dropped_is_said_to_be() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("a"), "old\n").unwrap();
        let fixture = fixture.started();
        std::fs::write(fixture.upper_path().join("a"), "new text\n").unwrap();
        let set = super::super::changes::scan(&fixture.upper, &fixture.workspace).unwrap();
        batch::apply(&fixture.batch(), &set.changes, &[]).unwrap();
        let (directory, mut manifest) = batch::manifests(&fixture.run_dir).unwrap().remove(0);
        manifest.slots.clear();
        manifest.dropped = vec!["a".to_owned()];
        let shown = applied(&fixture.run_dir, &directory, &manifest, &fixture.workspace);
        assert!(matches!(&shown[0].body, Body::Gone(reason) if reason.contains("too large to keep")), "{shown:?}");
    }

    #[test]
    fn a_report_is_the_same_change_before_and_after_it_is_applied() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("a"), "one\ntwo\nthree\n").unwrap();
        std::fs::write(fixture.workspace_path().join("gone"), "g\n").unwrap();
        let fixture = fixture.started();
        std::fs::write(fixture.upper_path().join("a"), "one\n2\nthree").unwrap();
        std::fs::write(fixture.upper_path().join("bin"), b"\0\x01").unwrap();
        fixture.whiteout("gone");
        Place::create(&fixture.run_dir, &fixture.run, &fixture.workspace_path(), fixture.since_ns, None, View::Overlay)
            .unwrap();
        let place = Place::open(&fixture.run_path()).unwrap();
        let before = text(&place.diff().unwrap());
        assert!(before.contains("-two\n+2\n") || before.contains("-two\n-three\n+2\n"), "{before}");
        assert!(before.contains("\\ No newline at end of file"), "{before}");
        assert!(before.contains("binary, 0 → 2 bytes"), "{before}");
        assert!(before.contains("deleted file gone\n@@ -1,1 +0,0 @@\n-g\n"), "{before}");
        batch::apply(&fixture.batch(), &place.changes().unwrap().changes, &[]).unwrap();
        let after = text(&place.diff().unwrap());
        assert_eq!(after, before.replace("# pending", "# applied"));
        std::fs::write(fixture.workspace_path().join("a"), "user\n").unwrap();
        assert!(text(&place.diff().unwrap()).contains("changed after the run"));
    }

    #[test]
    fn nothing_in_a_name_or_content_reaches_a_terminal_unescaped() {
        let fixture = Fixture::new().started();
        let evil = b"\x1b]0;owned\x07 \x9b31m \xff\r\xe2\x80\xae";
        std::fs::write(fixture.upper_path().join(OsStr::from_bytes(evil)), evil).unwrap();
        std::os::unix::fs::symlink(OsStr::from_bytes(evil), fixture.upper_path().join("link")).unwrap();
        Place::create(&fixture.run_dir, &fixture.run, &fixture.workspace_path(), fixture.since_ns, None, View::Overlay)
            .unwrap();
        let report = Place::open(&fixture.run_path()).unwrap().diff().unwrap();
        let shown = text(&report);
        assert!(shown.contains("\\x1b]0;owned\\x07"), "{shown}");
        assert!(!shown.chars().any(|character| character.is_control() && character != '\n'), "{shown:?}");
        assert!(!shown.contains('\u{202e}'));
        let mut json = Vec::new();
        report.write_json(&mut json).unwrap();
        assert_eq!(json.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count(), 2);
    }

    proptest! {
        #[test]
        fn the_new_lines_of_a_diff_are_the_new_text(old in "[ab\n]{0,40}", new in "[ab\n]{0,40}") {
            let hunks = compare(old.as_bytes(), new.as_bytes());
            let mut old_lines = old.split_inclusive('\n').map(str::to_owned).collect::<Vec<_>>();
            // Applied from the end, the earlier line numbers stay true.
            for hunk in hunks.iter().rev() {
                let mut fresh: Vec<String> = Vec::new();
                for line in &hunk.lines {
                    match line.as_bytes()[0] {
                        b' ' | b'+' => fresh.push(format!("{}\n", &line[1..])),
                        _ => {}
                    }
                }
                let start = if hunk.old_lines == 0 { hunk.old_start } else { hunk.old_start - 1 };
                old_lines.splice(start..start + hunk.old_lines, fresh);
            }
            let patched = old_lines.concat();
            prop_assert_eq!(patched.trim_end_matches('\n'), new.trim_end_matches('\n'));
        }
    }
}
