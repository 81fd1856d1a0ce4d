//! A policy file from anywhere: read whole, or refused with faults that lie within it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::{cell::RefCell, fs, io::Write, path::PathBuf};
use tollgate::policy::{
    fault::Source,
    file::PolicyFile,
    search::{PolicyRef, SearchPath},
    Policy,
};

thread_local! {
    static FILE: RefCell<(tempfile::TempDir, PathBuf)> = RefCell::new({
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("policy.toml");
        (folder, path)
    });
}

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let lines = text.lines().count().max(1) + 1;
    let source = Source { name: "policy.toml".into(), text: text.into() };
    match PolicyFile::parse(&source) {
        Err(faults) => {
            assert!(!faults.is_empty(), "refused, and not said why");
            for fault in faults {
                assert!((1..=lines).contains(&fault.line) && fault.column > 0, "{fault:?}");
                // What is shown to a person cannot steer a terminal.
                assert!(!fault.excerpt.chars().any(char::is_control), "{fault:?}");
            }
        }
        // Well-formed: composed with what it extends, it is a policy or a refusal.
        Ok(_) => FILE.with_borrow(|(_, path)| {
            let mut file = fs::File::create(path).expect("our own folder");
            file.write_all(data).expect("room");
            let search = SearchPath::of_user(None, None);
            if let Ok(reference) = PolicyRef::parse(&path.display().to_string()) {
                if let Ok(policy) = Policy::load(&reference, &search) {
                    let again = Policy::load(&reference, &search).expect("the same file");
                    assert_eq!(policy.digest, again.digest);
                }
            }
        }),
    }
});
