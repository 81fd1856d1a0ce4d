//! A run's own certificate authority.
//!
//! Made for one run, in the supervisor's memory, and gone with it. Its certificate is shown to the jail; its key never
//! leaves this process. Certificates carry what strict clients look for (RFC 5280, sections 4.2.1.1 to 4.2.1.12): key
//! identifiers, key usages, the name as an alternative name, a path length for the authority.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyIdMethod, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use rustls::{
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

/// How long certificates are valid. A run is shorter, and clients refuse more than 398 days.
const VALID: Duration = Duration::from_secs(30 * 24 * 3600);
/// Clocks disagree, and a program in the jail may have set its own back.
const EARLIER: Duration = Duration::from_secs(24 * 3600);
/// Certificates that are remembered. A program that connects to more names gets new ones each time.
const REMEMBERED: usize = 4096;

/// Why an authority or a certificate of it could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The certificate could not be written.
    #[error("a certificate for `{host}` cannot be made: {cause}")]
    Certificate {
        /// For whom.
        host: String,
        /// Why.
        cause: rcgen::Error,
    },
    /// The key could not be used.
    #[error("the run's key cannot be used: {0}")]
    Key(rustls::Error),
}

/// The authority of one run.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// One key for all of the run's servers: who has one has the supervisor's memory, and so all.
    key: KeyPair,
    signing: Arc<dyn rustls::sign::SigningKey>,
    made: Mutex<HashMap<String, Arc<CertifiedKey>>>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority")
    }
}

impl Authority {
    /// A new authority for this run.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`], where no randomness is to be had.
    pub fn new(run: &str) -> Result<Authority, AuthorityError> {
        let failed = |cause| AuthorityError::Certificate { host: format!("run {run}"), cause };
        let mut parameters = parameters(&format!("Tollgate run {run}")).map_err(failed)?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(parameters, KeyPair::generate().map_err(failed)?).map_err(failed)?;
        let key = KeyPair::generate().map_err(failed)?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let signing = rustls::crypto::ring::sign::any_supported_type(&der).map_err(AuthorityError::Key)?;
        Ok(Authority { issuer, key, signing, made: Mutex::default() })
    }

    /// The authority's certificate, as PEM: what the jail is to trust.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// The same as DER.
    pub fn der(&self) -> &[u8] {
        self.issuer.der()
    }

    /// A certificate for this host, a name or an address.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`], for a host that cannot stand in a certificate.
    pub fn certificate_for(&self, host: &str) -> Result<Arc<CertifiedKey>, AuthorityError> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = made.get(host) {
            return Ok(Arc::clone(known));
        }
        let failed = |cause| AuthorityError::Certificate { host: host.to_owned(), cause };
        let mut parameters = parameters(host).map_err(failed)?;
        let name = match host.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_name) => SanType::DnsName(host.try_into().map_err(failed)?),
        };
        parameters.subject_alt_names = vec![name];
        parameters.use_authority_key_identifier_extension = true;
        parameters.is_ca = IsCa::ExplicitNoCa;
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = parameters.signed_by(&self.key, &self.issuer).map_err(failed)?;
        let chain = vec![certificate.der().clone(), self.issuer.der().clone()];
        let certified = Arc::new(CertifiedKey::new(chain, Arc::clone(&self.signing)));
        if made.len() < REMEMBERED {
            made.insert(host.to_owned(), Arc::clone(&certified));
        }
        Ok(certified)
    }
}

fn parameters(common: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut parameters = CertificateParams::new(Vec::new())?;
    let mut name = DistinguishedName::new();
    // The field holds at most 64 characters (RFC 5280, appendix A.1, ub-common-name). Clients read the alternative name.
    name.push(DnType::CommonName, common.chars().take(64).collect::<String>());
    name.push(DnType::OrganizationName, "Tollgate");
    parameters.distinguished_name = name;
    parameters.key_identifier_method = KeyIdMethod::Sha256;
    let now = SystemTime::now();
    parameters.not_before = (now - EARLIER).into();
    parameters.not_after = (now + VALID).into();
    let mut serial = [0; 16];
    getrandom::fill(&mut serial).map_err(|_| rcgen::Error::RemoteKeyError)?;
    // Positive, and not starting with a zero byte (RFC 5280, section 4.1.2.2).
    serial[0] = serial[0] & 0x7f | 0x40;
    parameters.serial_number = Some(SerialNumber::from_slice(&serial));
    Ok(parameters)
}

/// Shows the certificate of one host, whatever name the client says. That the two agree is looked at for each request.
#[derive(Debug)]
pub struct OneHost(pub Arc<CertifiedKey>);

impl ResolvesServerCert for OneHost {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_made_once_for_a_host() {
        let authority = Authority::new("r1").unwrap();
        let (one, again) = (authority.certificate_for("a.test").unwrap(), authority.certificate_for("a.test").unwrap());
        assert!(Arc::ptr_eq(&one, &again));
        assert_eq!(one.cert.len(), 2);
        assert!(authority.certificate_for("127.0.0.1").is_ok());
        assert!(authority.certificate_for("::1").is_ok());
        assert!(authority.certificate_for(&"a".repeat(63)).is_ok());
    }

    #[test]
    fn two_runs_share_no_authority() {
        let (one, two) = (Authority::new("r").unwrap(), Authority::new("r").unwrap());
        assert_ne!(one.der(), two.der());
        assert!(one.pem().contains("BEGIN CERTIFICATE") && !one.pem().contains("PRIVATE"));
    }
}
