//! The host's key: what signs the heads of the host's chain, so that a copy of the ledger can be checked by somebody
//! who has the public half and nothing else.
//!
//! An Ed25519 key (RFC 8032) in `host.key` of the state directory: the 32 bytes of its seed as hexadecimal digits and
//! a newline, mode 0600, made when the ledger is first opened for writing and never replaced. Whoever can read it can
//! sign; what a signature shows is that the copy is the one which this host wrote, not that this host is honest.

use super::{store::io, Error, Result};
use crate::effect::Digest;
use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs,
    io::{ErrorKind, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    str::FromStr,
};
use zeroize::Zeroizing;

/// What is signed: each purpose has its own first bytes, so that no signature can serve another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A head of the host's chain.
    Seal,
    /// A cut.
    Cut,
}

/// The public half of a host's key, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey(pub [u8; 32]);

/// An Ed25519 signature, written as 128 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Signature(pub [u8; 64]);

/// The host's key.
pub(super) struct HostKey(SigningKey);

impl HostKey {
    /// The key of this state directory, made if there is none.
    pub(super) fn open(state: &Path) -> Result<HostKey> {
        let path = path(state);
        match HostKey::read(&path)? {
            Some(key) => Ok(key),
            None => {
                make(state, &path)?;
                HostKey::read(&path)?.ok_or_else(|| Error::KeyUnreadable { path, reason: "it went away".to_owned() })
            }
        }
    }

    /// The key in this file; none where there is no file.
    fn read(path: &Path) -> Result<Option<HostKey>> {
        let mut file = match fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(io("read", path, source)),
        };
        let mut text = Zeroizing::new([0; 65]);
        let unreadable = |reason: &str| Error::KeyUnreadable { path: path.to_owned(), reason: reason.to_owned() };
        file.read_exact(&mut *text).map_err(|_short| unreadable("it is shorter than a key"))?;
        let mut seed = Zeroizing::new([0; 32]);
        hex::decode_to_slice(&text[..64], &mut *seed).map_err(|_| unreadable("it is not 64 hexadecimal digits"))?;
        Ok(Some(HostKey(SigningKey::from_bytes(&seed))))
    }

    pub(super) fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }

    pub(super) fn sign(&self, purpose: Purpose, digest: &Digest) -> Signature {
        Signature(self.0.sign(&message(purpose, &self.public(), digest)).to_bytes())
    }
}

impl PublicKey {
    /// The public half of a state directory's key; none where it has no key yet.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or holds no key.
    pub fn of_host(state: &Path) -> Result<Option<PublicKey>> {
        Ok(HostKey::read(&path(state))?.map(|key| key.public()))
    }

    /// Whether this key made this signature for this purpose.
    pub(super) fn verifies(&self, purpose: Purpose, digest: &Digest, signature: &Signature) -> bool {
        let signature = ed25519_dalek::Signature::from_bytes(&signature.0);
        // Strict: keys and signatures of small order, which fit many messages, fit none.
        VerifyingKey::from_bytes(&self.0)
            .is_ok_and(|key| key.verify_strict(&message(purpose, self, digest), &signature).is_ok())
    }
}

fn path(state: &Path) -> PathBuf {
    state.join("host.key")
}

/// Makes the key so that it is there whole or not at all, also after a loss of power: nothing could be signed with
/// half of it, and a second one would make the first one's signatures a stranger's.
fn make(state: &Path, path: &Path) -> Result<()> {
    let mut seed = Zeroizing::new([0; 32]);
    getrandom::fill(&mut *seed)
        .map_err(|error| io("find random bytes for", path, std::io::Error::other(error.to_string())))?;
    let mut text = Zeroizing::new(hex::encode(seed.as_slice()));
    text.push('\n');
    let mut name = [0; 8];
    getrandom::fill(&mut name)
        .map_err(|error| io("find random bytes for", path, std::io::Error::other(error.to_string())))?;
    let temporary = state.join(format!("host.key.new-{}", hex::encode(name)));
    let write = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        match fs::hard_link(&temporary, path) {
            // Another first run was faster: its key is the host's.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }?;
        fs::File::open(state)?.sync_all()
    };
    let written = write().map_err(|source| io("make the host's key", path, source));
    // What cannot be removed is a name for the key in the same private directory.
    let _ = fs::remove_file(&temporary);
    written
}

fn message(purpose: Purpose, key: &PublicKey, digest: &Digest) -> Vec<u8> {
    let domain: &[u8] = match purpose {
        Purpose::Seal => b"tollgate.seal.v1\0",
        Purpose::Cut => b"tollgate.cut.v1\0",
    };
    [domain, &key.0, &digest.0].concat()
}

macro_rules! hexadecimal {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex::encode(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = hex::FromHexError;

            fn from_str(text: &str) -> std::result::Result<Self, hex::FromHexError> {
                let mut value = $name([0; std::mem::size_of::<$name>()]);
                hex::decode_to_slice(text, &mut value.0)?;
                Ok(value)
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hexadecimal!(PublicKey);
hexadecimal!(Signature);

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn the_key_is_made_once_private_and_whole() {
        let state = tempfile::tempdir().unwrap();
        assert_eq!(PublicKey::of_host(state.path()).unwrap(), None);
        let keys: Vec<PublicKey> = std::thread::scope(|scope| {
            let made: Vec<_> = (0..6).map(|_| scope.spawn(|| HostKey::open(state.path()).unwrap().public())).collect();
            made.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        assert_eq!(PublicKey::of_host(state.path()).unwrap(), Some(keys[0]));
        let names: Vec<_> = fs::read_dir(state.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["host.key"]);
        assert_eq!(fs::metadata(path(state.path())).unwrap().permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn a_file_that_is_no_key_is_refused_and_never_replaced() {
        let state = tempfile::tempdir().unwrap();
        for text in ["", "short", &"z".repeat(65)] {
            fs::write(path(state.path()), text).unwrap();
            let Err(error) = HostKey::open(state.path()) else { panic!("not refused") };
            assert!(matches!(error, Error::KeyUnreadable { .. }), "{error}");
            assert_eq!(fs::read_to_string(path(state.path())).unwrap(), text);
        }
        fs::remove_file(path(state.path())).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path(state.path())).unwrap();
        assert!(HostKey::open(state.path()).is_err());
    }

    #[test]
    fn a_signature_fits_its_key_its_purpose_and_its_digest_only() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (one, other) = (HostKey::open(one.path()).unwrap(), HostKey::open(other.path()).unwrap());
        let digest = Digest::of(b"head");
        let signature = one.sign(Purpose::Seal, &digest);
        assert!(one.public().verifies(Purpose::Seal, &digest, &signature));
        assert!(!one.public().verifies(Purpose::Cut, &digest, &signature));
        assert!(!one.public().verifies(Purpose::Seal, &Digest::of(b"other"), &signature));
        assert!(!other.public().verifies(Purpose::Seal, &digest, &signature));
        assert!(!PublicKey([0; 32]).verifies(Purpose::Seal, &digest, &Signature([0; 64])));
    }

    /// Whoever changes the signed bytes makes every signature that exists a stranger's.
    #[test]
    fn the_signature_of_a_known_key_is_this() {
        let state = tempfile::tempdir().unwrap();
        fs::write(path(state.path()), format!("{}\n", "07".repeat(32))).unwrap();
        let key = HostKey::open(state.path()).unwrap();
        assert_eq!(key.public().to_string(), GOLDEN[0]);
        assert_eq!(key.sign(Purpose::Seal, &Digest([1; 32])).to_string(), GOLDEN[1]);
        assert_eq!(key.sign(Purpose::Cut, &Digest([1; 32])).to_string(), GOLDEN[2]);
    }

    /// By `openssl pkeyutl -sign -rawin`.
    const GOLDEN: [&str; 3] = [
        "ea4a6c63e29c520abef5507b132ec5f9954776aebebe7b92421eea691446d22c",
        "148cb3fcb6dc99879b0964b616c4fa7e39cbd3153165b61e0e6362a43e046178d9a7e9c061edd906cc009177515263e9dcef31e35e6ddabd4588cc1ae73d240d",
        "0ea1e24eaba9cee30fcce3e9fb15716c25331d3398eb00f93ab692d33f4a5d87cf9f375558a1d415113e6c3ead13b09fb4d80bfd5de1db344a0c077b09867405",
    ];
}
