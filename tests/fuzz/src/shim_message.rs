//! What the shim says: it stands inside the jail, so its word is judged like a stranger's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use tollgate::{effect::Subject, service::denials};
use tollgate_shim::protocol::FromShim;

fuzz_target!(|data: &[u8]| {
    let Ok(message) = serde_json::from_slice::<FromShim>(data) else { return };
    let again = serde_json::to_vec(&message).expect("a message is JSON");
    assert_eq!(serde_json::from_slice::<FromShim>(&again).expect("and JSON is a message"), message);
    if let FromShim::Denied(denied) = message {
        let context = denials::Context {
            // Nothing there is looked at: the folder does not exist.
            workspace: PathBuf::from("/nonexistent/workspace"),
            read_only: true,
            shared_git: None,
            subject: Subject { uid: 1000, run: None, agent: None },
            room: None,
            network: true,
        };
        if let Some((effect, answer)) = denials::judge(&denied, &context) {
            assert!(!answer.is_success() && !answer.reason.is_empty(), "{effect:?} {answer:?}");
            let _ = effect.digest();
        }
    }
});
