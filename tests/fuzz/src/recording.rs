//! Recordings from anywhere: read whole, with every content's digest right, or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tollgate::{chain::recording::Recording, effect::Digest};

fuzz_target!(|data: &[u8]| {
    if let Ok(recording) = Recording::parse(data) {
        for (digest, content) in &recording.contents {
            assert_eq!(Digest::of(content), *digest);
        }
    }
});
