//! An answer from a host that knows a secret, in pieces: however it is cut, the same comes out, and never the value.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use tollgate::{
    effect::http::Request,
    policy::secret::{Secret, SecretOrigin, SecretPlace, SecretSource},
    world::secrets::{Scrub, Vault},
};

/// With what encodings differ about: a slash, a plus, a quote and a space.
const VALUE: &str = "s3cr/et+\"a b\"==";

thread_local! {
    static SCRUB: RefCell<Scrub> = RefCell::new({
        let origin = SecretOrigin::parse("https://api.test").expect("an origin");
        let secret = Secret {
            name: "TOKEN".into(),
            from: SecretSource::Env("TOKEN".into()),
            to: vec![origin],
            places: vec![SecretPlace::Header("authorization".into())],
            methods: Vec::new(),
            rate: None,
            ask: false,
        };
        let (vault, absent) = Vault::open(&[secret], &[("TOKEN".into(), VALUE.into())]).expect("a value");
        assert!(absent.is_empty());
        vault.scrub(&Request::parse("GET", "https://api.test/").expect("a URL")).expect("it goes there")
    });
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, rest)) = data.split_first() else { return };
    // A byte that text does not have stands for the value, so that the fuzzer meets it often.
    let mut text = Vec::new();
    for byte in rest {
        match byte {
            0xff => text.extend_from_slice(VALUE.as_bytes()),
            0xfe => text.extend_from_slice(&VALUE.as_bytes()[..VALUE.len() / 2]),
            other => text.push(*other),
        }
    }
    let whole = scrubbed(&text, text.len().max(1));
    assert_eq!(scrubbed(&text, usize::from(*cut) % 23 + 1), whole, "cut otherwise");
    assert!(!whole.windows(VALUE.len()).any(|window| window == VALUE.as_bytes()), "the value came out");
    if !text.windows(2).any(|pair| VALUE.as_bytes().windows(2).any(|own| own == pair)) && text.len() < 8 {
        assert_eq!(whole, text, "nothing of it is the value's");
    }
});

fn scrubbed(text: &[u8], piece: usize) -> Vec<u8> {
    let mut scrub = SCRUB.with_borrow(Clone::clone);
    let mut out = Vec::new();
    for piece in text.chunks(piece) {
        out.extend(scrub.pass(piece));
    }
    out.extend(scrub.finish());
    out
}
