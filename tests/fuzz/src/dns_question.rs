//! What a jailed program asks the resolver in its jail: every question gets an answer that fits, about that question.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tollgate::doors::network::{
    dns::{self, Verdict, Wanted},
    names::{canonical_host, Names},
};

fuzz_target!(|data: &[u8]| {
    let Some(question) = dns::read(data) else { return };
    let room = question.room();
    assert!((512..=4096).contains(&room), "{room}");
    let mut verdicts = vec![Verdict::NoName, Verdict::NoData, Verdict::Failure, Verdict::Refused];
    match &question.wanted {
        Wanted::Name { name, .. } => {
            assert_eq!(canonical_host(name).as_ref(), Some(name), "a name is handed on in its one form");
            let mut names = Names::default();
            let addresses = names.addresses_of(name).expect("the first of many");
            assert_eq!(names.name_of(addresses.v4.into()), Some(&**name));
            assert_eq!(names.name_of(addresses.v6.into()), Some(&**name));
            verdicts.push(Verdict::Addresses(addresses));
        }
        Wanted::Address(_) => answers(data, question.answer_name(Some("host.test"), room), room),
        Wanted::Nothing(verdict) => verdicts.push(*verdict),
    }
    for verdict in verdicts {
        answers(data, question.answer(verdict, room), room);
    }
});

/// The identifier of the question, the mark of an answer, and no more than there is room for (RFC 1035, section 4.1.1).
fn answers(question: &[u8], answer: Option<Vec<u8>>, room: usize) {
    let Some(answer) = answer else { return };
    assert!(answer.len() <= room, "{} bytes", answer.len());
    assert_eq!(answer[..2], question[..2]);
    assert!(answer[2] & 0x80 != 0, "not marked as an answer");
    assert!(dns::read(&answer).is_none(), "an answer read as a question would make a loop");
}
