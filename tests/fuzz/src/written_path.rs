//! Paths as receipts write them: any bytes can be written, what was written reads back, and no spelling leaves the workspace.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};
use tollgate::effect::path::{escape, from_workspace_path, shell_word, unescape, workspace_path};

fuzz_target!(|data: &[u8]| {
    let written = escape(data);
    assert_eq!(unescape(&written).expect("what was escaped"), data);
    let _ = shell_word(&written);
    if let Ok(text) = std::str::from_utf8(data) {
        if let Ok(bytes) = unescape(text) {
            assert_eq!(unescape(&escape(&bytes)).expect("what was escaped"), bytes);
        }
        if let Ok(path) = from_workspace_path(text) {
            // However it was spelled, it is one path with one spelling of ours.
            let written = workspace_path(&path).expect("came from one");
            assert_eq!(from_workspace_path(&written).expect("our own spelling"), path);
        }
    }
    if let Ok(path) = workspace_path(Path::new(OsStr::from_bytes(data))) {
        let back = from_workspace_path(&path).expect("came from one");
        assert!(back.components().all(|part| matches!(part, std::path::Component::Normal(_))), "{back:?}");
    }
});
