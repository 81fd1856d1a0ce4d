import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Asks for one address with the JDK's own client and prints what came. */
public class Hello {
    public static void main(String[] arguments) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0])).build();
        HttpResponse<String> response = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        System.out.println(response.version() + " " + response.statusCode() + " "
            + response.headers().firstValue("retry-after").orElse(""));
        System.out.print(response.body());
        System.exit(response.statusCode() == 200 ? 0 : 1);
    }
}
