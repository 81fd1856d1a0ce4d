//! What passed over a connection, in its order, so that it can be played again.
//!
//! The bytes are pieces, one after another: `>` for what the program sent or `<` for what it was sent, the length as
//! four bytes, big-endian, and as many bytes. A length of nothing says that this side sends no more. Neighbouring pieces
//! of one side are one piece, so the text of a conversation does not depend on how the network cut it.

use crate::chain::recording::MAX_BODY;

/// The bytes before each piece: whose it is, and its length.
const HEAD: usize = 5;

/// Who sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The program.
    Program,
    /// The server.
    Server,
}

impl Side {
    const fn mark(self) -> u8 {
        match self {
            Side::Program => b'>',
            Side::Server => b'<',
        }
    }
}

/// A conversation that is being written down.
#[derive(Debug, Default)]
pub struct Conversation {
    bytes: Vec<u8>,
    /// Where the last piece begins, and whose it is, if it can become longer.
    last: Option<(usize, Side)>,
    /// It became longer than a recording takes.
    too_long: bool,
}

impl Conversation {
    /// One side said this.
    pub fn said(&mut self, side: Side, said: &[u8]) {
        if said.is_empty() || !self.has_room(said.len()) {
            return;
        }
        match self.last {
            Some((at, before)) if before == side => {
                self.bytes.extend_from_slice(said);
                let length = self.bytes.len() - at - HEAD;
                self.bytes[at + 1..at + HEAD].copy_from_slice(&length_bytes(length));
            }
            _ => {
                self.last = Some((self.bytes.len(), side));
                self.bytes.push(side.mark());
                self.bytes.extend_from_slice(&length_bytes(said.len()));
                self.bytes.extend_from_slice(said);
            }
        }
    }

    /// One side says no more.
    pub fn ended(&mut self, side: Side) {
        if self.has_room(0) {
            self.last = None;
            self.bytes.push(side.mark());
            self.bytes.extend_from_slice(&length_bytes(0));
        }
    }

    /// All of it; none where it became too long to be recorded.
    pub fn finish(self) -> Option<Vec<u8>> {
        (!self.too_long).then_some(self.bytes)
    }

    fn has_room(&mut self, more: usize) -> bool {
        if self.bytes.len() + HEAD + more > MAX_BODY {
            self.too_long = true;
            self.bytes = Vec::new();
        }
        !self.too_long
    }
}

/// A piece is shorter than [`MAX_BODY`], which is far below what four bytes hold.
fn length_bytes(length: usize) -> [u8; 4] {
    u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes()
}

/// A piece of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Who sends it.
    pub side: Side,
    /// What; nothing where the side ends.
    pub bytes: &'a [u8],
}

/// The pieces of a conversation, or none where the bytes are no conversation.
pub fn pieces(mut bytes: &[u8]) -> Option<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
        let [mark, length @ ..] = *head;
        let side = [Side::Program, Side::Server].into_iter().find(|side| side.mark() == mark)?;
        let (piece, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(length)).ok()?)?;
        pieces.push(Piece { side, bytes: piece });
        bytes = rest;
    }
    bytes.is_empty().then_some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_said_is_read_back_in_its_order() {
        let mut conversation = Conversation::default();
        for part in ["he", "llo"] {
            conversation.said(Side::Program, part.as_bytes());
        }
        conversation.said(Side::Server, b"hi");
        conversation.ended(Side::Program);
        conversation.said(Side::Server, b"bye");
        conversation.ended(Side::Server);
        let bytes = conversation.finish().unwrap();
        assert_eq!(bytes, b">\0\0\0\x05hello<\0\0\0\x02hi>\0\0\0\0<\0\0\0\x03bye<\0\0\0\0");
        let said: Vec<(Side, &[u8])> = pieces(&bytes).unwrap().iter().map(|piece| (piece.side, piece.bytes)).collect();
        let (program, server) = (Side::Program, Side::Server);
        assert_eq!(said, [(program, &b"hello"[..]), (server, b"hi"), (program, b""), (server, b"bye"), (server, b"")]);
    }

    #[test]
    fn one_that_is_too_long_is_none() {
        let mut conversation = Conversation::default();
        conversation.said(Side::Server, &vec![0; MAX_BODY - HEAD]);
        conversation.said(Side::Program, b"x");
        conversation.said(Side::Program, b"y");
        assert_eq!(conversation.finish(), None);
    }

    proptest! {
        #[test]
        fn cuts_make_no_difference(said in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<u8>(), 1..9)), 0..9)) {
            let side = |program: bool| if program { Side::Program } else { Side::Server };
            let (mut whole, mut cut) = (Conversation::default(), Conversation::default());
            for (program, bytes) in &said {
                whole.said(side(*program), bytes);
                bytes.iter().for_each(|byte| cut.said(side(*program), &[*byte]));
            }
            let whole = whole.finish().unwrap();
            prop_assert_eq!(&cut.finish().unwrap(), &whole);
            let total: usize = pieces(&whole).unwrap().iter().map(|piece| piece.bytes.len()).sum();
            prop_assert_eq!(total, said.iter().map(|(_, bytes)| bytes.len()).sum::<usize>());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = pieces(&bytes);
        }
    }
}
