//! Questions about names, answered inside the run.
//!
//! Pure: bytes in, bytes out. hickory reads and writes the messages; nothing here looks anything up. A name's addresses
//! are those that stand for it in this run ([`super::names`]); what has no addresses gets the negative answer that its
//! type calls for, so that a resolver neither retries nor waits.

use super::names::{canonical_host, Addresses};
use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{
        rdata::{A, AAAA, PTR, SOA},
        DNSClass, Name, RData, Record, RecordType,
    },
};
use std::net::IpAddr;

/// How long a program may remember an answer, in seconds. An address means its name as long as the run lives, but a
/// resolver that never asks again would hide names from the receipts.
const TIME_TO_LIVE: u32 = 60;

/// What a datagram may carry to somebody who said nothing else (RFC 1035, section 4.2.1).
pub const SMALL_DATAGRAM: usize = 512;

/// A question that was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    message: Message,
    query: Query,
    /// What is asked for.
    pub wanted: Wanted,
}

/// What a question wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Records of a name, in its canonical form.
    Name {
        /// The name.
        name: String,
        /// The type of record, by its mnemonic: `A`, `TXT`.
        record: String,
    },
    /// The name behind an address.
    Address(IpAddr),
    /// Something that has no answer but this one.
    Nothing(Verdict),
}

/// How a question is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// With the addresses that stand for the name.
    Addresses(Addresses),
    /// There is no such name (NXDOMAIN).
    NoName,
    /// The name has no record of that type (NODATA).
    NoData,
    /// Not now: EAI_AGAIN to a C program (SERVFAIL).
    Failure,
    /// This server does not do that (NOTIMP).
    NotImplemented,
    /// Not answered on principle (REFUSED).
    Refused,
}

/// Reads a message. None for what is no question, which is dropped like any stray datagram.
pub fn read(packet: &[u8]) -> Option<Question> {
    let message = Message::from_vec(packet).ok()?;
    if message.metadata.message_type != MessageType::Query {
        return None;
    }
    let query = message.queries.first()?.clone();
    let wanted = match () {
        () if message.metadata.op_code != OpCode::Query => Wanted::Nothing(Verdict::NotImplemented),
        () if message.queries.len() != 1 || query.query_class() != DNSClass::IN => Wanted::Nothing(Verdict::Refused),
        () if matches!(query.query_type(), RecordType::AXFR | RecordType::IXFR) => Wanted::Nothing(Verdict::Refused),
        () => wanted(query.name(), query.query_type()),
    };
    Some(Question { message, query, wanted })
}

fn wanted(name: &Name, record: RecordType) -> Wanted {
    if let (RecordType::PTR, Some(address)) = (record, address_of_reverse(name)) {
        return Wanted::Address(address);
    }
    // The form with escapes: a label with a dot or a zero byte in it is no host's and is not to look like one.
    match canonical_host(&name.to_ascii()) {
        Some(name) => Wanted::Name { name, record: record.to_string() },
        None => Wanted::Nothing(Verdict::NoName),
    }
}

/// The address that a name of `in-addr.arpa` or `ip6.arpa` is about.
fn address_of_reverse(name: &Name) -> Option<IpAddr> {
    let net = name.parse_arpa_name().ok()?;
    let whole = match net.addr() {
        IpAddr::V4(_) => net.prefix_len() == 32,
        IpAddr::V6(_) => net.prefix_len() == 128,
    };
    whole.then(|| net.addr())
}

impl Question {
    /// The answer as a message of at most `room` bytes: one that does not fit says that it was cut, and the asker comes
    /// again by TCP. None only where it cannot be written at all, and then nothing is sent.
    pub fn answer(&self, verdict: Verdict, room: usize) -> Option<Vec<u8>> {
        let asked = self.query.query_type();
        let code = match verdict {
            Verdict::Addresses(_) | Verdict::NoData => ResponseCode::NoError,
            Verdict::NoName => ResponseCode::NXDomain,
            Verdict::Failure => ResponseCode::ServFail,
            Verdict::NotImplemented => ResponseCode::NotImp,
            Verdict::Refused => ResponseCode::Refused,
        };
        let mut reply = self.reply(code);
        if let Verdict::Addresses(addresses) = verdict {
            let record = |data| Record::from_rdata(self.query.name().clone(), TIME_TO_LIVE, data);
            if matches!(asked, RecordType::A | RecordType::ANY) {
                reply.add_answer(record(RData::A(A(addresses.v4))));
            }
            if matches!(asked, RecordType::AAAA | RecordType::ANY) {
                reply.add_answer(record(RData::AAAA(AAAA(addresses.v6))));
            }
        }
        self.finish(reply, room)
    }

    /// The answer about an address: the name that it stands for, or that there is none.
    pub fn answer_name(&self, name: Option<&str>, room: usize) -> Option<Vec<u8>> {
        let found = name.and_then(|name| Name::from_ascii(format!("{name}.")).ok());
        let mut reply = self.reply(if found.is_some() { ResponseCode::NoError } else { ResponseCode::NXDomain });
        if let Some(found) = found {
            reply.add_answer(Record::from_rdata(self.query.name().clone(), TIME_TO_LIVE, RData::PTR(PTR(found))));
        }
        self.finish(reply, room)
    }

    fn reply(&self, code: ResponseCode) -> Message {
        let mut reply = Message::response(self.message.metadata.id, self.message.metadata.op_code);
        reply.metadata.recursion_desired = self.message.metadata.recursion_desired;
        reply.metadata.recursion_available = true;
        reply.metadata.response_code = code;
        reply.add_query(self.query.clone());
        if self.message.edns.is_some() {
            reply.set_edns(hickory_proto::op::Edns::new());
        }
        reply
    }

    fn finish(&self, mut reply: Message, room: usize) -> Option<Vec<u8>> {
        if reply.answers.is_empty() {
            // How long the absence may be remembered (RFC 2308, section 3). Without it resolvers ask again at once.
            let root = Name::root();
            let soa = SOA::new(root.clone(), root.clone(), 1, 60, 60, 60, TIME_TO_LIVE);
            reply.add_authority(Record::from_rdata(root, TIME_TO_LIVE, RData::SOA(soa)));
        }
        let bytes = reply.to_vec().ok()?;
        if bytes.len() <= room {
            return Some(bytes);
        }
        reply.truncate().to_vec().ok().filter(|bytes| bytes.len() <= room)
    }

    /// How much a datagram to this asker may carry (RFC 6891, section 6.2.3).
    pub fn room(&self) -> usize {
        usize::from(self.message.max_payload()).clamp(SMALL_DATAGRAM, 4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doors::network::names::Names;
    use proptest::prelude::*;

    fn ask(name: &str, record: RecordType) -> Vec<u8> {
        let mut message = Message::new(7, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), record));
        message.to_vec().unwrap()
    }

    fn answered(packet: &[u8], verdict: impl Fn(&Question) -> Verdict) -> Message {
        let question = read(packet).unwrap();
        Message::from_vec(&question.answer(verdict(&question), SMALL_DATAGRAM).unwrap()).unwrap()
    }

    #[test]
    fn a_name_has_the_address_of_the_type_that_was_asked_for() {
        let addresses = Names::default().addresses_of("api.test").unwrap();
        for (record, wanted) in
            [(RecordType::A, IpAddr::from(addresses.v4)), (RecordType::AAAA, IpAddr::from(addresses.v6))]
        {
            let reply = answered(&ask("API.test.", record), |question| {
                assert_eq!(question.wanted, Wanted::Name { name: "api.test".into(), record: record.to_string() });
                Verdict::Addresses(addresses)
            });
            assert_eq!((reply.metadata.id, reply.metadata.response_code), (7, ResponseCode::NoError));
            let found: Vec<_> = reply.answers.iter().filter_map(|record| record.data.ip_addr()).collect();
            assert_eq!(found, [wanted]);
        }
    }

    #[test]
    fn other_types_have_no_data_and_say_for_how_long() {
        let addresses = Names::default().addresses_of("api.test").unwrap();
        for record in [RecordType::TXT, RecordType::MX, RecordType::HTTPS, RecordType::SRV] {
            let reply = answered(&ask("api.test.", record), |_| Verdict::Addresses(addresses));
            assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::NoError, 0));
            assert_eq!(reply.authorities.len(), 1);
        }
    }

    #[test]
    fn the_verdicts_have_their_codes() {
        for (verdict, code) in [
            (Verdict::NoName, ResponseCode::NXDomain),
            (Verdict::NoData, ResponseCode::NoError),
            (Verdict::Failure, ResponseCode::ServFail),
            (Verdict::Refused, ResponseCode::Refused),
        ] {
            assert_eq!(answered(&ask("a.test.", RecordType::A), |_| verdict).metadata.response_code, code);
        }
    }

    #[test]
    fn an_address_leads_back_to_its_name() {
        let mut names = Names::default();
        let addresses = names.addresses_of("api.test").unwrap();
        let question = read(&ask("0.1.18.198.in-addr.arpa.", RecordType::PTR)).unwrap();
        assert_eq!(question.wanted, Wanted::Address(addresses.v4.into()));
        let reply = Message::from_vec(&question.answer_name(Some("api.test"), SMALL_DATAGRAM).unwrap()).unwrap();
        assert!(reply.answers[0].data.to_string().contains("api.test"), "{reply:?}");
        let none = Message::from_vec(&question.answer_name(None, SMALL_DATAGRAM).unwrap()).unwrap();
        assert_eq!(none.metadata.response_code, ResponseCode::NXDomain);
    }

    #[test]
    fn what_is_no_host_name_is_never_one() {
        for odd in ["a\\.b.test.", "a\\000b.test.", "a b.test."] {
            let Ok(name) = Name::from_ascii(odd) else { continue };
            assert_eq!(wanted(&name, RecordType::A), Wanted::Nothing(Verdict::NoName), "{odd}");
        }
    }

    #[test]
    fn an_answer_is_not_taken_for_a_question() {
        let mut message = Message::from_vec(&ask("a.test.", RecordType::A)).unwrap();
        message.metadata.message_type = MessageType::Response;
        assert_eq!(read(&message.to_vec().unwrap()), None);
    }

    proptest! {
        #[test]
        fn no_packet_makes_it_panic_and_every_answer_is_readable(packet in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(question) = read(&packet) {
                if let Some(bytes) = question.answer(Verdict::NoData, question.room()) {
                    prop_assert!(Message::from_vec(&bytes).is_ok());
                }
            }
        }
    }
}
